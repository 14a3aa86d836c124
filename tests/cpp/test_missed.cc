#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

#include "core/missed.h"

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
  missed.Push(buffer, DataType::kFloat32, kElements);
}

void Push(MissedResults& missed, int round) {
  Buffer buffer;
  Push(missed, round, buffer);
}

// The first element of each result; checks the others on the way.
std::vector<int> Firsts(std::deque<Buffer> results) {
  std::vector<int> firsts;
  for (auto& result : results) {
    const auto* values = static_cast<const float*>(result.data());
    EXPECT_EQ(values[1], 10 * values[0]);
    EXPECT_EQ(values[2], 100 * values[0]);
    firsts.push_back(static_cast<int>(values[0]));
  }
  return firsts;
}

TEST(MissedTest, IsEmptyAtFirst) {
  for (const Missed mode : {Missed::kSum, Missed::kReplay, Missed::kLatest}) {
    MissedResults missed(mode);
    EXPECT_TRUE(missed.empty());
    EXPECT_EQ(missed.rounds(), 0);
    EXPECT_EQ(missed.bytes(), 0u);
    EXPECT_TRUE(missed.Take().empty());
  }
}

TEST(MissedTest, SumAddsUp) {
  MissedResults missed(Missed::kSum);
  for (const int round : {1, 2, 4}) Push(missed, round);
  EXPECT_EQ(missed.rounds(), 3);
  EXPECT_THAT(Firsts(missed.Take()), ElementsAre(7));
  EXPECT_TRUE(missed.empty());
}

TEST(MissedTest, LatestForgetsAllButTheNewest) {
  MissedResults missed(Missed::kLatest);
  for (const int round : {1, 2, 4}) Push(missed, round);
  EXPECT_EQ(missed.rounds(), 3) << "it still knows how many it has missed";
  EXPECT_THAT(Firsts(missed.Take()), ElementsAre(4));
}

TEST(MissedTest, ReplayKeepsThemApartInOrder) {
  MissedResults missed(Missed::kReplay);
  for (int round = 1; round <= 8; ++round) Push(missed, round);
  EXPECT_THAT(Firsts(missed.Take()), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST(MissedTest, ReplayBeyondItsDepthAddsUpTheOldestAndLosesNothing) {
  MissedResults missed(Missed::kReplay);
  for (int round = 1; round <= 11; ++round) Push(missed, round);
  EXPECT_EQ(missed.rounds(), 11);
  const std::vector<int> results = Firsts(missed.Take());
  EXPECT_THAT(results, ElementsAre(1 + 2 + 3 + 4, 5, 6, 7, 8, 9, 10, 11));
  EXPECT_EQ(std::accumulate(results.begin(), results.end(), 0), 66);
}

TEST(MissedTest, StartsAnewAfterTake) {
  for (const Missed mode : {Missed::kSum, Missed::kReplay, Missed::kLatest}) {
    MissedResults missed(mode);
    Push(missed, 1);
    missed.Take();
    Push(missed, 5);
    EXPECT_EQ(missed.rounds(), 1);
    EXPECT_THAT(Firsts(missed.Take()), ElementsAre(5));
  }
}

TEST(MissedTest, ClearForgetsEverything) {
  MissedResults missed(Missed::kSum);
  Push(missed, 1);
  missed.Clear();
  EXPECT_TRUE(missed.empty());
  Push(missed, 2);
  EXPECT_THAT(Firsts(missed.Take()), ElementsAre(2));
}

TEST(MissedTest, RecycledStorageIsUsedForTheNextResult) {
  MissedResults missed(Missed::kSum);
  Push(missed, 1);
  std::deque<Buffer> taken = missed.Take();
  const void* storage = taken.front().data();
  missed.Recycle(std::move(taken.front()));
  EXPECT_EQ(missed.bytes(), kElements * sizeof(float));
  Buffer result;
  Push(missed, 2, result);
  EXPECT_EQ(result.data(), storage) << "what Push leaves behind is the storage that came back";
}

TEST(MissedTest, CountsTheStorageThatItHolds) {
  MissedResults missed(Missed::kReplay);
  for (int round = 1; round <= 20; ++round) Push(missed, round);
  EXPECT_EQ(missed.bytes(), 8 * kElements * sizeof(float));
}

}  // namespace
}  // namespace horovod_partial
