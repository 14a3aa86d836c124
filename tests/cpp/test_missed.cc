#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/rounds/missed.h"

namespace horovod_partial {
namespace {

using testing::ElementsAre;

constexpr std::size_t kElements = 3;

// The result of round n is {n, 10 n, 100 n}: a sum of several tells how often each is in it, for up to 9 rounds.
void Push(MissedResults& missed, int round, Buffer& buffer) {
  buffer.Reserve(kElements * sizeof(float));
  auto* values = static_cast<float*>(buffer.data());
  for (std::size_t i = 0; i < kElements; ++i)
    values[i] = static_cast<float>(round) * (i == 0 ? 1.f : i == 1 ? 10.f : 100.f);
  missed.Push(buffer, 2, DataType::kFloat32, kElements);
}

void Push(MissedResults& missed, int round) {
  Buffer buffer;
  Push(missed, round, buffer);
}

// The first element of each result, 0 where there is none; checks the others on the way.
std::vector<int> Firsts(MissedResults& missed) {
  std::vector<int> firsts;
  while (!missed.empty()) {
    const MissedResults::Result result = missed.Pop();
    EXPECT_EQ(result.sum.empty(), result.gradients == 0);
    const auto* values = static_cast<const float*>(result.sum.data());
    firsts.push_back(values == nullptr ? 0 : static_cast<int>(values[0]));
    if (values == nullptr) continue;
    EXPECT_EQ(values[1], 10 * values[0]);
    EXPECT_EQ(values[2], 100 * values[0]);
  }
  return firsts;
}

TEST(MissedTest, IsEmptyAtFirst) {
  for (const Missed mode : {Missed::kSum, Missed::kReplay, Missed::kLatest}) {
    MissedResults missed(mode, 8);
    EXPECT_TRUE(missed.empty());
    EXPECT_EQ(missed.rounds(), 0);
    EXPECT_EQ(missed.oldest_rounds(), 0);
    EXPECT_EQ(missed.bytes(), 0u);
  }
}

TEST(MissedTest, SumAddsUp) {
  MissedResults missed(Missed::kSum, 8);
  for (const int round : {1, 2, 4}) Push(missed, round);
  EXPECT_EQ(missed.rounds(), 3);
  EXPECT_EQ(missed.summed(), 0) << "as was asked for";
  EXPECT_THAT(Firsts(missed), ElementsAre(7));
}

TEST(MissedTest, LatestForgetsAllButTheNewest) {
  MissedResults missed(Missed::kLatest, 8);
  for (const int round : {1, 2, 4}) Push(missed, round);
  EXPECT_EQ(missed.rounds(), 3) << "it still knows how many it has missed";
  EXPECT_THAT(Firsts(missed), ElementsAre(4));
}

TEST(MissedTest, ReplayKeepsThemApartInOrder) {
  MissedResults missed(Missed::kReplay, 8);
  for (int round = 1; round <= 8; ++round) Push(missed, round);
  EXPECT_EQ(missed.summed(), 0);
  EXPECT_THAT(Firsts(missed), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST(MissedTest, ReplayBeyondItsLimitAddsUpTheOldestLosesNothingAndCountsIt) {
  MissedResults missed(Missed::kReplay, 8);
  for (int round = 1; round <= 11; ++round) Push(missed, round);
  EXPECT_EQ(missed.rounds(), 11);
  EXPECT_EQ(missed.oldest_rounds(), 4);
  EXPECT_EQ(missed.summed(), 3);
  EXPECT_THAT(Firsts(missed), ElementsAre(1 + 2 + 3 + 4, 5, 6, 7, 8, 9, 10, 11));
}

TEST(MissedTest, ReplayLeavesApartWhatIsBeingTaken) {
  MissedResults missed(Missed::kReplay, 3);
  for (const int round : {1, 2, 4}) Push(missed, round);
  missed.BeTaken(true);
  Push(missed, 8);
  EXPECT_EQ(missed.oldest_rounds(), 1) << "as the taker has seen it";
  missed.Pop();
  missed.BeTaken(false);
  Push(missed, 16);
  EXPECT_EQ(missed.summed(), 1);
  EXPECT_THAT(Firsts(missed), ElementsAre(6, 8, 16));
}

TEST(MissedTest, ReplayCountsRoundsWithoutAResult) {
  MissedResults missed(Missed::kReplay, 3);
  Push(missed, 1);
  missed.PushEmpty();
  Push(missed, 2);
  EXPECT_EQ(missed.rounds(), 3);
  Push(missed, 3);
  EXPECT_EQ(missed.oldest_rounds(), 2);
  EXPECT_EQ(missed.summed(), 0) << "there was nothing to be added";
  EXPECT_EQ(missed.Pop().gradients, 2);
  EXPECT_THAT(Firsts(missed), ElementsAre(2, 3));
}

TEST(MissedTest, StartsAnewWhenAllHasBeenTaken) {
  for (const Missed mode : {Missed::kSum, Missed::kReplay, Missed::kLatest}) {
    MissedResults missed(mode, 8);
    Push(missed, 1);
    missed.Pop();
    Push(missed, 5);
    EXPECT_EQ(missed.rounds(), 1);
    EXPECT_THAT(Firsts(missed), ElementsAre(5));
  }
}

TEST(MissedTest, ClearForgetsEverything) {
  MissedResults missed(Missed::kSum);
  Push(missed, 1);
  missed.Clear();
  EXPECT_TRUE(missed.empty());
  Push(missed, 2);
  EXPECT_THAT(Firsts(missed), ElementsAre(2));
}

TEST(MissedTest, MadeEmptyItKeepsTheNumbers) {
  MissedResults missed(Missed::kReplay, 8);
  for (const int round : {1, 2}) Push(missed, round);
  missed.MakeEmpty();
  EXPECT_EQ(missed.bytes(), 0u);
  EXPECT_THAT(Firsts(missed), ElementsAre(0, 0));
}

TEST(MissedTest, RecycledStorageIsUsedForTheNextResult) {
  MissedResults missed(Missed::kSum);
  Push(missed, 1);
  Buffer taken = missed.Pop().sum;
  const void* storage = taken.data();
  missed.Recycle(std::move(taken));
  EXPECT_EQ(missed.bytes(), kElements * sizeof(float));
  Buffer result;
  Push(missed, 2, result);
  EXPECT_EQ(result.data(), storage) << "what Push leaves behind is the storage that came back";
}

TEST(MissedTest, CountsTheStorageThatItHolds) {
  MissedResults missed(Missed::kReplay, 8);
  for (int round = 1; round <= 20; ++round) Push(missed, round);
  EXPECT_EQ(missed.bytes(), 8 * kElements * sizeof(float));
}

}  // namespace
}  // namespace horovod_partial
