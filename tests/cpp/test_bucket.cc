#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/bucket.h"

namespace horovod_partial {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::FloatEq;
using State = Bucket::State;
using Arrived = Bucket::Arrived;
using Values = std::vector<float>;

constexpr Rank kRank = 1;
constexpr int kSize = 3;

// A bucket of 2 floats on rank 1 of 3. The other ranks are made up: a test says what their contributions add up to.
class BucketTest : public testing::Test {
 protected:
  static BucketOptions Options() {
    BucketOptions options;
    options.elements = 2;
    return options;
  }

  static Bucket::Arrival InPlace(Values& values, int gradients = 1) {
    return {values.data(), values.data(), gradients};
  }

  // This rank's part in the closing; each of the others contributes one fresh gradient.
  Closing Close(Closing::Contribution mine) {
    Closing closing;
    closing.bucket = bucket_.name();
    closing.round = next_round_++;
    closing.contributions.assign(kSize, {1, true});
    closing.contributions[kRank] = mine;
    return closing;
  }
  Closing CloseWithout() { return Close({bucket_.ReportPending(), false}); }
  Closing CloseWith() { return Close({bucket_.ReportArrival(), true}); }

  // What the transport does: the entry's input, and what the others send, goes to its output.
  static void Reduce(const Bucket::Entry& entry, float others) {
    const auto* input = static_cast<const float*>(entry.input);
    auto* output = static_cast<float*>(entry.output);
    for (std::size_t i = 0; i < 2; ++i) output[i] = input[i] + others;
  }
  static Values Sent(const Bucket::Entry& entry) {
    const auto* input = static_cast<const float*>(entry.input);
    return {input, input + 2};
  }

  // A whole round that this rank misses.
  void MissRound(float others) {
    Reduce(bucket_.Begin(CloseWithout(), kRank), others);
    bucket_.Finish();
  }
  // Makes this rank late by one gradient of {1, 2}, having taken a result of {10, 10}.
  void BecomeLate() {
    MissRound(10);
    Values late = {1, 2};
    ASSERT_EQ(bucket_.Arrive(InPlace(late)), Arrived::kLate);
    bucket_.TakeMissed(late.data());
  }

  Values Take() {
    Values taken(2);
    bucket_.TakeMissed(taken.data());
    return taken;
  }

  Bucket bucket_{"bucket", Options()};
  Round next_round_ = 0;
};

// --- An arrival that is on time

TEST_F(BucketTest, IsIdleAtFirst) {
  EXPECT_EQ(bucket_.state(), State::kIdle);
  EXPECT_FALSE(bucket_.declared());
  EXPECT_FALSE(bucket_.HasPending());
  EXPECT_FALSE(bucket_.HasMissed());
  EXPECT_EQ(bucket_.completed(), 0);
  EXPECT_EQ(bucket_.held_bytes(), 0u);
}

TEST_F(BucketTest, OnTimeGoesThroughAllStates) {
  Values values = {1, 2};
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kOnTime);
  EXPECT_EQ(bucket_.state(), State::kArrived);
  EXPECT_FALSE(bucket_.reported());
  EXPECT_EQ(bucket_.ReportArrival(), 1);
  EXPECT_TRUE(bucket_.reported());
  const Bucket::Entry entry = bucket_.Begin(CloseWith(), kRank);
  EXPECT_EQ(bucket_.state(), State::kRunning);
  EXPECT_TRUE(bucket_.declared());
  Reduce(entry, 5);
  EXPECT_TRUE(bucket_.Finish());
  EXPECT_EQ(bucket_.state(), State::kIdle);
  EXPECT_EQ(bucket_.completed(), 1);
  EXPECT_THAT(values, ElementsAre(6, 7));
  EXPECT_FALSE(bucket_.HasMissed());
}

TEST_F(BucketTest, OnTimeIsSentFromWhereItLies) {
  Values input = {1, 2}, output(2);
  bucket_.Arrive({input.data(), output.data(), 1});
  const Bucket::Entry entry = bucket_.Begin(CloseWith(), kRank);
  EXPECT_TRUE(entry.own);
  EXPECT_EQ(entry.input, input.data());
  EXPECT_EQ(entry.output, output.data());
  EXPECT_EQ(bucket_.held_bytes(), 0u);
}

TEST_F(BucketTest, ReportingTwiceChangesNothing) {
  BecomeLate();
  Values values = {10, 20};
  bucket_.Arrive(InPlace(values));
  EXPECT_EQ(bucket_.ReportArrival(), 2);
  EXPECT_EQ(bucket_.ReportArrival(), 2);
  EXPECT_EQ(bucket_.ReportPending(), 0) << "it has gone into the arrival";
  EXPECT_THAT(values, ElementsAre(11, 22));
}

TEST_F(BucketTest, ASecondArrivalIsRefused) {
  Values values = {1, 2};
  bucket_.Arrive(InPlace(values));
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kBusy);
  bucket_.Begin(CloseWith(), kRank);
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kBusy) << "also while its round is running";
  EXPECT_FALSE(bucket_.HasPending());
}

// --- Late

TEST_F(BucketTest, WithoutAnArrivalZerosAreSent) {
  const Bucket::Entry entry = bucket_.Begin(CloseWithout(), kRank);
  EXPECT_FALSE(entry.own);
  EXPECT_THAT(Sent(entry), Each(0));
  Reduce(entry, 5);
  EXPECT_FALSE(bucket_.Finish());
  EXPECT_TRUE(bucket_.HasMissed());
  EXPECT_EQ(bucket_.missed_rounds(), 1);
}

TEST(BucketOfHalvesTest, TellsOfASumThatIsNotFinite) {
  BucketOptions options;
  options.type = DataType::kFloat16;
  options.elements = 2;
  constexpr std::uint16_t kLargest = 0x7bff;  // 65,504
  for (const bool overflows : {false, true}) {
    Bucket bucket("halves", options);
    for (Round round = 0; round < 2; ++round) {
      Closing closing;
      closing.round = round;
      closing.contributions = {{1, true}, {0, false}};
      auto* result = static_cast<std::uint16_t*>(bucket.Begin(closing, 1).output);
      result[0] = result[1] = overflows ? kLargest : 0;
      bucket.Finish();
    }
    std::uint16_t sum[2];
    EXPECT_EQ(bucket.TakeMissed(sum), !overflows);
    EXPECT_EQ(sum[0], overflows ? 0x7c00 : 0) << "infinity";
  }
}

TEST_F(BucketTest, LateTakesTheResultAndLeavesItsContributionPending) {
  MissRound(5);
  MissRound(7);
  Values values = {1, 2};
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kLate);
  EXPECT_EQ(bucket_.state(), State::kIdle);
  EXPECT_EQ(bucket_.missed_rounds(), 2);
  bucket_.TakeMissed(values.data());
  EXPECT_THAT(values, Each(12));
  EXPECT_FALSE(bucket_.HasMissed());
  EXPECT_TRUE(bucket_.HasPending());
  EXPECT_EQ(bucket_.ReportPending(), 1);
}

TEST_F(BucketTest, PendingTravelsWithTheNextRoundThatCloses) {
  BecomeLate();
  const Bucket::Entry entry = bucket_.Begin(CloseWithout(), kRank);
  EXPECT_THAT(Sent(entry), ElementsAre(1, 2));
  Reduce(entry, 0);
  bucket_.Finish();
  EXPECT_FALSE(bucket_.HasPending());
  EXPECT_EQ(bucket_.ReportPending(), 0);
}

TEST_F(BucketTest, PendingTravelsWithTheNextArrival) {
  BecomeLate();
  Values values = {10, 20};
  ASSERT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kOnTime);
  const Closing closing = CloseWith();
  EXPECT_EQ(closing.contributions[kRank].gradients, 2);
  EXPECT_THAT(Sent(bucket_.Begin(closing, kRank)), ElementsAre(11, 22));
  EXPECT_FALSE(bucket_.HasPending());
}

TEST_F(BucketTest, PendingIsMergedIntoTheOutputWhenInputAndOutputDiffer) {
  BecomeLate();
  const Values input = {10, 20};
  Values output(2, -1);
  ASSERT_EQ(bucket_.Arrive({input.data(), output.data(), 1}), Arrived::kOnTime);
  const Bucket::Entry entry = bucket_.Begin(CloseWith(), kRank);
  EXPECT_THAT(Sent(entry), ElementsAre(11, 22));
  EXPECT_THAT(input, ElementsAre(10, 20)) << "the application's gradient is not ours to write";
  EXPECT_EQ(entry.output, output.data());
}

TEST_F(BucketTest, PendingContributionsAddUp) {
  BecomeLate();
  EXPECT_EQ(bucket_.ReportPending(), 1);
  EXPECT_EQ(bucket_.ReportPending(), 1) << "announced again in every cycle";
  const Closing closing = CloseWithout();
  const Bucket::Entry entry = bucket_.Begin(closing, kRank);  // delivers {1, 2}
  Reduce(entry, 0);
  bucket_.Finish();
  for (int i = 0; i < 2; ++i) {  // late twice: the round above and another one are missed
    Values values = {3, 4};
    ASSERT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kLate) << i;
    bucket_.TakeMissed(values.data());
    if (i == 0) MissRound(1);
  }
  EXPECT_EQ(bucket_.ReportPending(), 1) << "the first of them went with the round in between";
}

TEST_F(BucketTest, WhatComesAfterTheAnnouncementWaitsForTheNextRound) {
  MissRound(5);
  const Closing closing = CloseWithout();  // announces nothing
  Values values = {1, 2};
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kLate);
  bucket_.TakeMissed(values.data());
  const Bucket::Entry entry = bucket_.Begin(closing, kRank);
  EXPECT_THAT(Sent(entry), Each(0)) << "the closing is the truth";
  Reduce(entry, 0);
  bucket_.Finish();
  EXPECT_EQ(bucket_.ReportPending(), 1);
  EXPECT_THAT(Sent(bucket_.Begin(CloseWithout(), kRank)), ElementsAre(1, 2));
}

TEST_F(BucketTest, AnnouncedAndLaterContributionsMeetInTheNextAnnouncement) {
  BecomeLate();
  EXPECT_EQ(bucket_.ReportPending(), 1);
  // A second late arrival before any round has closed would need a missed result: it comes with a running round.
  const Bucket::Entry entry = bucket_.Begin(CloseWithout(), kRank);
  Values values = {100, 200};
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kWaiting);
  EXPECT_THAT(Sent(entry), ElementsAre(1, 2)) << "what is being sent is not written";
  Reduce(entry, 0);
  bucket_.Finish();
  EXPECT_THAT(Take(), ElementsAre(1, 2));
  EXPECT_EQ(bucket_.ReportPending(), 1);
  EXPECT_THAT(Sent(bucket_.Begin(CloseWithout(), kRank)), ElementsAre(100, 200));
}

// --- While a round is running

TEST_F(BucketTest, AnArrivalWhileRunningWaitsForTheResultOnly) {
  const Bucket::Entry entry = bucket_.Begin(CloseWithout(), kRank);
  Values values = {1, 2};
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kWaiting);
  EXPECT_EQ(bucket_.state(), State::kRunning);
  EXPECT_EQ(bucket_.ReportPending(), 0) << "not announced before the round has ended";
  Reduce(entry, 5);
  EXPECT_FALSE(bucket_.Finish());
  EXPECT_THAT(Take(), Each(5));
  EXPECT_EQ(bucket_.ReportPending(), 1);
}

TEST_F(BucketTest, NoSecondRoundBeginsWhileOneRuns) {
  bucket_.Begin(CloseWithout(), kRank);
  EXPECT_THROW(bucket_.Begin(CloseWithout(), kRank), std::logic_error);
}

// --- An arrival that slipped in between report and closing

TEST_F(BucketTest, ASlippedArrivalBecomesLate) {
  const Closing closing = CloseWithout();
  Values values = {1, 2};
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kOnTime);
  const Bucket::Entry entry = bucket_.Begin(closing, kRank);
  EXPECT_FALSE(entry.own);
  EXPECT_THAT(Sent(entry), Each(0));
  EXPECT_NE(entry.output, values.data());
  Reduce(entry, 5);
  EXPECT_FALSE(bucket_.Finish());
  EXPECT_THAT(Take(), Each(5));
  EXPECT_EQ(bucket_.ReportPending(), 1);
  EXPECT_THAT(Sent(bucket_.Begin(CloseWithout(), kRank)), ElementsAre(1, 2));
}

TEST_F(BucketTest, ASlippedArrivalLeavesTheAnnouncedSumAlone) {
  BecomeLate();
  const Closing closing = CloseWithout();  // announces {1, 2}
  Values values = {10, 20};
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kOnTime);
  const Bucket::Entry entry = bucket_.Begin(closing, kRank);
  EXPECT_THAT(Sent(entry), ElementsAre(1, 2));
  Reduce(entry, 0);
  bucket_.Finish();
  EXPECT_THAT(Take(), ElementsAre(1, 2));
  EXPECT_THAT(Sent(bucket_.Begin(CloseWithout(), kRank)), ElementsAre(10, 20));
}

TEST_F(BucketTest, AnArrivalReportedButLeftOutIsAnError) {
  Values values = {1, 2};
  bucket_.Arrive(InPlace(values));
  bucket_.ReportArrival();
  EXPECT_THROW(bucket_.Begin(Close({0, false}), kRank), std::logic_error);
}

TEST_F(BucketTest, AClosingThatNamesWhatWasNotAnnouncedIsAnError) {
  EXPECT_THROW(bucket_.Begin(Close({1, true}), kRank), std::logic_error);
  EXPECT_THROW(bucket_.Begin(Close({1, false}), kRank), std::logic_error);
}

// --- Arrivals that only deliver

TEST_F(BucketTest, AnArrivalWithoutInputSendsZeros) {
  Values output = {9, 9};
  EXPECT_EQ(bucket_.Arrive({nullptr, output.data(), 0}), Arrived::kOnTime);
  const Closing closing = CloseWith();
  EXPECT_EQ(closing.contributions[kRank].gradients, 0);
  EXPECT_THAT(Sent(bucket_.Begin(closing, kRank)), Each(0));
}

TEST_F(BucketTest, AnArrivalWithoutInputDeliversWhatIsPending) {
  BecomeLate();
  Values output(2);
  EXPECT_EQ(bucket_.Arrive({nullptr, output.data(), 0}), Arrived::kOnTime);
  const Closing closing = CloseWith();
  EXPECT_EQ(closing.contributions[kRank].gradients, 1);
  EXPECT_THAT(Sent(bucket_.Begin(closing, kRank)), ElementsAre(1, 2));
}

TEST_F(BucketTest, AnArrivalWithoutInputLeavesItsResultAmongTheMissedOnes) {
  MissRound(5);
  Values lent(2);
  EXPECT_EQ(bucket_.Arrive({nullptr, lent.data(), 0}), Arrived::kOnTime) << "it does not take what was missed";
  Reduce(bucket_.Begin(CloseWith(), kRank), 7);
  EXPECT_FALSE(bucket_.Finish());
  EXPECT_EQ(bucket_.missed_rounds(), 2);
  EXPECT_THAT(Take(), Each(12));
}

TEST_F(BucketTest, AnArrivalWithoutInputWhileRunningAddsNothing) {
  const Bucket::Entry entry = bucket_.Begin(CloseWithout(), kRank);
  Values lent(2);
  EXPECT_EQ(bucket_.Arrive({nullptr, lent.data(), 0}), Arrived::kWaiting);
  Reduce(entry, 5);
  bucket_.Finish();
  EXPECT_FALSE(bucket_.HasPending());
  EXPECT_THAT(Take(), Each(5));
}

TEST_F(BucketTest, ASlippedArrivalWithoutInputAddsNothing) {
  const Closing closing = CloseWithout();
  Values output(2);
  bucket_.Arrive({nullptr, output.data(), 0});
  const Bucket::Entry entry = bucket_.Begin(closing, kRank);
  Reduce(entry, 5);
  bucket_.Finish();
  EXPECT_FALSE(bucket_.HasPending());
  EXPECT_TRUE(bucket_.HasMissed());
  Values late = {1, 2};
  bucket_.Arrive(InPlace(late));
  Take();
  EXPECT_THAT(Sent(bucket_.Begin(CloseWithout(), kRank)), ElementsAre(1, 2));
}

TEST_F(BucketTest, ARoundWithoutAnyGradientIsNoResult) {
  Closing closing = CloseWithout();
  closing.contributions.assign(kSize, {0, false});
  Reduce(bucket_.Begin(closing, kRank), 0);
  EXPECT_FALSE(bucket_.Finish());
  EXPECT_FALSE(bucket_.HasMissed());
  EXPECT_EQ(bucket_.completed(), 1);
}

TEST_F(BucketTest, WhoWaitsForARoundWithoutAnyGradientGetsZeros) {
  Closing closing = CloseWithout();
  closing.contributions.assign(kSize, {0, false});
  const Bucket::Entry entry = bucket_.Begin(closing, kRank);
  Values values = {1, 2};
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kWaiting);
  Reduce(entry, 0);
  bucket_.Finish();
  EXPECT_THAT(Take(), Each(0));
  EXPECT_EQ(bucket_.ReportPending(), 1);
}

// --- Missed results

// A member of a family, with one element.
class MemberTest : public testing::Test {
 protected:
  static BucketOptions Options() {
    BucketOptions options;
    options.elements = 1;
    options.missed = Missed::kReplay;
    options.replay_limit = 3;
    return options;
  }
  // The next round ends here, with this result and so many gradients of the other rank.
  void EndRound(float result, int gradients = 1) {
    Closing closing;
    closing.round = bucket_.completed();
    const int own = bucket_.reported() ? bucket_.arrival().gradients : bucket_.ReportPending();
    closing.contributions = {{own, bucket_.reported()}, {gradients, gradients > 0}};
    *static_cast<float*>(bucket_.Begin(closing, 0).output) = result;
    bucket_.Finish();
  }
  Arrived ArriveOnTime() {
    const Arrived arrived = bucket_.Arrive({&value_, &value_, 1});
    bucket_.ReportArrival();
    return arrived;
  }
  float Take(int rounds, int gradients) {
    float taken = -1;
    EXPECT_EQ(bucket_.TakeRounds(rounds, &taken), gradients);
    return taken;
  }
  Bucket bucket_{"bucket", Options()};
  float value_ = 1;
};

TEST_F(MemberTest, ResultsAreTakenOneByOneOldestFirst) {
  for (const float result : {1.F, 2.F, 3.F}) EndRound(result);
  EXPECT_EQ(bucket_.untaken(), 3);
  EXPECT_TRUE(bucket_.full());
  EXPECT_EQ(Take(1, 1), 1);
  EXPECT_EQ(bucket_.taken(), 1);
  EXPECT_EQ(Take(2, 2), 5) << "two as one";
  EXPECT_EQ(bucket_.taken(), 3);
}

TEST_F(MemberTest, TheResultOfAnArrivalIsTheOldestAndLiesWhereItWasWanted) {
  EXPECT_EQ(ArriveOnTime(), Arrived::kOnTime);
  EndRound(7);
  EXPECT_EQ(value_, 7);
  EndRound(8);
  EXPECT_EQ(bucket_.untaken(), 2);
  EXPECT_EQ(bucket_.Arrive({&value_, &value_, 1}), Arrived::kBusy) << "it has not been taken";
  EXPECT_EQ(Take(1, 2), 7);
  EXPECT_EQ(Take(1, 1), 8);
}

TEST_F(MemberTest, ALateArrivalTakesNothing) {
  EndRound(5);
  EXPECT_EQ(bucket_.Arrive({&value_, &value_, 1}), Arrived::kLate);
  EXPECT_EQ(value_, 1);
  EXPECT_EQ(bucket_.untaken(), 1);
}

TEST_F(MemberTest, ARoundWithoutAGradientCounts) {
  EndRound(5);
  EndRound(0, 0);
  EXPECT_EQ(bucket_.untaken(), 2);
  EXPECT_EQ(Take(1, 1), 5);
  EXPECT_EQ(Take(1, 0), 0);
}

TEST_F(MemberTest, BeyondTheLimitTheOldestComeAsOne) {
  for (const float result : {1.F, 2.F, 3.F, 4.F, 5.F}) EndRound(result);
  EXPECT_EQ(bucket_.untaken(), 5);
  EXPECT_EQ(bucket_.oldest_rounds(), 3);
  EXPECT_EQ(bucket_.summed(), 2);
  EXPECT_EQ(Take(3, 3), 6);
}

TEST_F(MemberTest, ClearForgetsCompleteRoundsAndEmptiesTheOthers) {
  for (const float result : {1.F, 2.F, 3.F}) EndRound(result);
  bucket_.Clear(2);
  EXPECT_EQ(bucket_.taken(), 2);
  EXPECT_EQ(Take(1, 0), 0) << "another member has not ended it";
  EXPECT_EQ(bucket_.taken(), 3);
}

// --- Clear

TEST_F(BucketTest, ClearForgetsWhatIsPendingAndMissed) {
  MissRound(5);
  Values values = {1, 2};
  bucket_.Arrive(InPlace(values));
  bucket_.Clear();
  EXPECT_FALSE(bucket_.HasPending());
  EXPECT_FALSE(bucket_.HasMissed());
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kOnTime);
  EXPECT_THAT(Sent(bucket_.Begin(CloseWith(), kRank)), ElementsAre(1, 2));
}

TEST_F(BucketTest, ClearAsksForAFullRound) {
  EXPECT_FALSE(bucket_.wants_full_round());
  bucket_.Clear();
  EXPECT_FALSE(bucket_.wants_full_round()) << "round 0 is one anyway";
  MissRound(5);
  bucket_.Clear();
  EXPECT_TRUE(bucket_.wants_full_round());
  MissRound(5);
  EXPECT_TRUE(bucket_.wants_full_round()) << "until it has taken part in one";
  Take();
  Values values = {1, 2};
  bucket_.Arrive(InPlace(values));
  bucket_.Begin(CloseWith(), kRank);
  EXPECT_FALSE(bucket_.wants_full_round());
}

TEST_F(BucketTest, WhatWasAnnouncedBeforeAClearIsDeliveredAsNothing) {
  BecomeLate();
  const Closing closing = CloseWithout();
  EXPECT_EQ(closing.contributions[kRank].gradients, 1);
  bucket_.Clear();
  EXPECT_THAT(Sent(bucket_.Begin(closing, kRank)), Each(0));
}

TEST_F(BucketTest, WhatWasAnnouncedBeforeAClearCountsInNoLaterRound) {
  BecomeLate();
  CloseWithout();
  --next_round_;  // another bucket closed in that cycle
  bucket_.Clear();
  EXPECT_FALSE(bucket_.HasPending());
  EXPECT_EQ(bucket_.ReportPending(), 0) << "a divisor would count a gradient that is gone";
  Values values = {5, 6};
  bucket_.Arrive(InPlace(values));
  EXPECT_EQ(bucket_.ReportArrival(), 1);
  const Bucket::Entry entry = bucket_.Begin(CloseWith(), kRank);
  EXPECT_THAT(Sent(entry), ElementsAre(5, 6));
}

TEST_F(BucketTest, AnArrivalBetweenAnAnnouncementAndAClearCountsItselfOnly) {
  BecomeLate();
  bucket_.ReportPending();
  bucket_.Clear();
  Values values = {5, 6};
  bucket_.Arrive(InPlace(values));
  EXPECT_EQ(bucket_.ReportArrival(), 1);
}

TEST_F(BucketTest, AClearWhileADeliveryRunsDiscardsTheResult) {
  BecomeLate();
  Values lent(2);
  ASSERT_EQ(bucket_.Arrive({nullptr, lent.data()}), Arrived::kOnTime);
  Reduce(bucket_.Begin(CloseWith(), kRank), 10);
  bucket_.Clear();
  EXPECT_FALSE(bucket_.Finish());
  EXPECT_FALSE(bucket_.HasMissed());
}

TEST_F(BucketTest, AClearWhileRunningDiscardsTheResult) {
  BecomeLate();
  const Bucket::Entry entry = bucket_.Begin(CloseWithout(), kRank);
  bucket_.Clear();
  EXPECT_THAT(Sent(entry), ElementsAre(1, 2)) << "what is being sent is not written";
  Reduce(entry, 5);
  bucket_.Finish();
  EXPECT_FALSE(bucket_.HasMissed());
  EXPECT_FALSE(bucket_.HasPending());
}

// --- Options

class DivisorTest : public BucketTest {
 protected:
  DivisorTest() {
    BucketOptions options = Options();
    options.divisor = Divisor::kContributors;
    new_bucket_.emplace("bucket", options);
  }
  // One round, of which this rank's part is `mine`, the others' `others` each; every gradient is {6, 6}.
  Values Run(Closing::Contribution mine, Closing::Contribution others) {
    Values values = {6, 6};
    if (mine.fresh) {
      new_bucket_->Arrive(InPlace(values));
      new_bucket_->ReportArrival();
    }
    Closing closing = Close(mine);
    closing.contributions[0] = closing.contributions[2] = others;
    Reduce(new_bucket_->Begin(closing, kRank), 6.f * static_cast<float>(2 * others.gradients));
    if (!new_bucket_->Finish()) new_bucket_->TakeMissed(values.data());
    return values;
  }
  std::optional<Bucket> new_bucket_;
};

TEST_F(DivisorTest, DividesByTheGradientsInTheSum) {
  EXPECT_THAT(Run({1, true}, {1, true}), Each(6)) << "3 of them";
  EXPECT_THAT(Run({1, true}, {0, false}), Each(6)) << "1";
  EXPECT_THAT(Run({0, false}, {1, true}), Each(6)) << "2, none of them its own";
  EXPECT_THAT(Run({1, true}, {3, false}), Each(FloatEq(6))) << "7, most of them pending ones";
}

TEST_F(BucketTest, LeavesTheSumAloneByDefault) {
  Values values = {6, 6};
  bucket_.Arrive(InPlace(values));
  Reduce(bucket_.Begin(CloseWith(), kRank), 12);
  bucket_.Finish();
  EXPECT_THAT(values, Each(18));
}

class NonFiniteTest : public BucketTest {
 protected:
  void MakeBucket() {
    BucketOptions options = Options();
    options.drop_nonfinite = true;
    dropping_.emplace("bucket", options);
  }
  void Miss(float others) {
    Reduce(dropping_->Begin(Close({dropping_->ReportPending(), false}), kRank), others);
    dropping_->Finish();
  }
  std::optional<Bucket> dropping_;
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();
};

TEST_F(NonFiniteTest, ALateContributionIsDroppedAndCounted) {
  MakeBucket();
  Miss(5);
  Values values = {1, kInfinity};
  EXPECT_EQ(dropping_->Arrive(InPlace(values)), Arrived::kLate);
  EXPECT_EQ(dropping_->dropped(), 1);
  EXPECT_FALSE(dropping_->HasPending());
}

TEST_F(NonFiniteTest, SoIsOneThatSlippedIn) {
  MakeBucket();
  const Closing closing = Close({0, false});
  Values values = {1, std::numeric_limits<float>::quiet_NaN()};
  dropping_->Arrive(InPlace(values));
  Reduce(dropping_->Begin(closing, kRank), 5);
  dropping_->Finish();
  EXPECT_EQ(dropping_->dropped(), 1);
  EXPECT_EQ(dropping_->ReportPending(), 0);
}

TEST_F(NonFiniteTest, OneThatIsOnTimeIsSent) {
  MakeBucket();
  Values values = {1, kInfinity};  // the GradScaler of every rank shall see it, and skip the step
  dropping_->Arrive(InPlace(values));
  EXPECT_EQ(dropping_->ReportArrival(), 1);
  EXPECT_EQ(dropping_->dropped(), 0);
}

TEST_F(NonFiniteTest, AMissedResultIsKept) {
  MakeBucket();
  Miss(kInfinity);
  EXPECT_EQ(dropping_->dropped(), 0);
  EXPECT_TRUE(dropping_->HasMissed());
}

TEST_F(BucketTest, NothingIsDroppedByDefault) {
  MissRound(5);
  Values values = {1, std::numeric_limits<float>::infinity()};
  bucket_.Arrive(InPlace(values));
  EXPECT_TRUE(bucket_.HasPending());
  EXPECT_EQ(bucket_.dropped(), 0);
}

class DiscardLateTest : public BucketTest {};

TEST_F(DiscardLateTest, ALateContributionIsNotDelivered) {
  BucketOptions options = Options();
  options.late = Late::kDiscard;
  Bucket models("models", options);
  Reduce(models.Begin(Close({0, false}), kRank), 5);
  models.Finish();
  Values late = {1, 2};
  EXPECT_EQ(models.Arrive(InPlace(late)), Arrived::kLate);
  EXPECT_FALSE(models.HasPending());
  models.TakeMissed(late.data());
  EXPECT_THAT(late, Each(5));
  Values on_time = {3, 4};
  EXPECT_EQ(models.Arrive(InPlace(on_time)), Arrived::kOnTime);
  EXPECT_EQ(models.ReportArrival(), 1);
  EXPECT_THAT(Sent(models.Begin(Close({1, true}), kRank)), ElementsAre(3, 4));
}

// --- Models that are kept

class KeptModelTest : public BucketTest {
 protected:
  KeptModelTest() { MakeBucket(); }
  void MakeBucket(Divisor divisor = Divisor::kContributors) {
    BucketOptions options = Options();
    options.late = Late::kKeep;
    options.missed = Missed::kLatest;
    options.divisor = divisor;
    models_.emplace("models", options);
  }

  // This rank's part in the closing, of all ranks; the others' models add up to what the test says.
  Closing CloseModels(Closing::Contribution mine) {
    Closing closing = Close(mine);
    closing.bucket = models_->name();
    return closing;
  }
  Closing CloseKept() {
    const int models = models_->ReportPending();
    return CloseModels({models, false, models_->ReportLate() == 0});
  }
  // A round for which this rank is on time, or that it misses.
  Values OnTime(Values model, float others) {
    EXPECT_EQ(models_->Arrive(InPlace(model)), Arrived::kOnTime);
    Reduce(models_->Begin(CloseModels({models_->ReportArrival(), true}), kRank), others);
    EXPECT_TRUE(models_->Finish());
    return model;
  }
  Values Miss(float others) {
    const Bucket::Entry entry = models_->Begin(CloseKept(), kRank);
    const Values sent = Sent(entry);
    Reduce(entry, others);
    EXPECT_FALSE(models_->Finish());
    return sent;
  }
  Values Late(Values model) {
    EXPECT_EQ(models_->Arrive(InPlace(model)), Arrived::kLate);
    models_->TakeMissed(model.data());
    return model;
  }
  std::optional<Bucket> models_;
};

TEST_F(KeptModelTest, OnTimeIsTheMean) { EXPECT_THAT(OnTime({1, 2}, 8), ElementsAre(3, FloatEq(10 / 3.F))); }

TEST_F(KeptModelTest, OnTimeIsSentFromWhereItLies) {
  Values input = {1, 2}, output(2);
  models_->Arrive({input.data(), output.data(), 1});
  const Bucket::Entry entry = models_->Begin(CloseModels({models_->ReportArrival(), true}), kRank);
  EXPECT_EQ(entry.input, input.data());
  EXPECT_EQ(entry.output, output.data());
  EXPECT_TRUE(entry.own);
}

// C3 of WAGMA-SGD, with the models of a group of 2.
TEST_F(KeptModelTest, LateIsTheSumWithTheOldModelAndTheNewOne) {
  OnTime({1, 2}, 8);
  const Bucket::Entry entry = [&] {
    Closing closing = CloseKept();
    closing.contributions[2] = {0, false};  // rank 0 and this one
    return models_->Begin(closing, kRank);
  }();
  EXPECT_THAT(Sent(entry), ElementsAre(1, 2)) << "the model that was there last stands in";
  Reduce(entry, 6);  // rank 0's; it gets (6 + 1) / 2 of this
  models_->Finish();
  EXPECT_THAT(Late({10, 20}), ElementsAre(FloatEq((1 + 6 + 10) / 3.F), FloatEq((2 + 6 + 20) / 3.F)));
}

TEST_F(KeptModelTest, IsSentInRoundAfterRound) {
  OnTime({1, 2}, 8);
  for (int round = 0; round < 3; ++round) EXPECT_THAT(Miss(5), ElementsAre(1, 2)) << round;
  EXPECT_EQ(models_->missed_rounds(), 3);
  EXPECT_THAT(Late({10, 20}), ElementsAre(FloatEq(16 / 4.F), FloatEq(27 / 4.F))) << "of the newest round only";
  for (int round = 0; round < 3; ++round) EXPECT_THAT(Miss(5), ElementsAre(10, 20)) << round;
}

TEST_F(KeptModelTest, OnlyWhatCameSinceTheLastRoundIsLate) {
  EXPECT_EQ(models_->ReportPending(), 0) << "there is none yet";
  EXPECT_EQ(models_->ReportLate(), 0);
  OnTime({1, 2}, 8);
  EXPECT_EQ(models_->ReportPending(), 1);
  EXPECT_EQ(models_->ReportLate(), 0) << "it has been in a round";
  Miss(5);
  Late({10, 20});
  for (int cycle = 0; cycle < 2; ++cycle) {
    EXPECT_EQ(models_->ReportPending(), 1);
    EXPECT_EQ(models_->ReportLate(), 1);
  }
  Miss(5);
  EXPECT_EQ(models_->ReportPending(), 1);
  EXPECT_EQ(models_->ReportLate(), 0);
}

TEST_F(KeptModelTest, OnlyTheNewestOfSeveralLateOnesIsSent) {
  OnTime({1, 2}, 8);
  const Closing closing = CloseKept();
  const Bucket::Entry first = models_->Begin(closing, kRank);
  Values second = {3, 4};
  EXPECT_EQ(models_->Arrive(InPlace(second)), Arrived::kWaiting);
  Reduce(first, 5);
  models_->Finish();
  models_->TakeMissed(second.data());
  const Closing next = CloseKept();  // announces {3, 4}
  EXPECT_FALSE(next.contributions[kRank].stale);
  const Bucket::Entry entry = models_->Begin(next, kRank);
  Values third = {5, 6};
  EXPECT_EQ(models_->Arrive(InPlace(third)), Arrived::kWaiting);
  EXPECT_THAT(Sent(entry), ElementsAre(3, 4));
  Reduce(entry, 5);
  models_->Finish();
  models_->TakeMissed(third.data());
  EXPECT_EQ(models_->ReportPending(), 1);
  EXPECT_EQ(models_->ReportLate(), 1);
  EXPECT_THAT(Miss(5), ElementsAre(5, 6));
}

TEST_F(KeptModelTest, AnArrivalWhileRunningDoesNotTouchWhatIsSent) {
  OnTime({1, 2}, 8);
  const Bucket::Entry entry = models_->Begin(CloseKept(), kRank);
  Values model = {10, 20};
  EXPECT_EQ(models_->Arrive(InPlace(model)), Arrived::kWaiting);
  EXPECT_EQ(models_->ReportPending(), 0) << "not announced before the round has ended";
  EXPECT_THAT(Sent(entry), ElementsAre(1, 2));
  EXPECT_NE(entry.output, entry.input) << "the kept model survives its round";
  Reduce(entry, 5);
  EXPECT_FALSE(models_->Finish());
  EXPECT_TRUE(models_->HasUnannounced());
  models_->TakeMissed(model.data());
  EXPECT_THAT(model, ElementsAre(FloatEq((1 + 5 + 10) / 4.F), FloatEq((2 + 5 + 20) / 4.F)));
  EXPECT_THAT(Miss(5), ElementsAre(10, 20));
}

TEST_F(KeptModelTest, AnArrivalThatSlippedInIsLate) {
  OnTime({1, 2}, 8);
  const Closing closing = CloseKept();
  Values model = {10, 20};
  EXPECT_EQ(models_->Arrive(InPlace(model)), Arrived::kOnTime);
  const Bucket::Entry entry = models_->Begin(closing, kRank);
  EXPECT_FALSE(entry.own);
  EXPECT_THAT(Sent(entry), ElementsAre(1, 2));
  Reduce(entry, 5);
  EXPECT_FALSE(models_->Finish());
  models_->TakeMissed(model.data());
  EXPECT_THAT(model, ElementsAre(FloatEq((1 + 5 + 10) / 4.F), FloatEq((2 + 5 + 20) / 4.F)));
  EXPECT_EQ(models_->ReportPending(), 1);
  EXPECT_EQ(models_->ReportLate(), 1);
  EXPECT_THAT(Miss(5), ElementsAre(10, 20));
}

// Its request is on the way while another cycle reports what is pending.
TEST_F(KeptModelTest, AnArrivalThatIsNotReportedYetLeavesTheAnnouncedModel) {
  OnTime({1, 2}, 8);
  Values model = {10, 20};
  EXPECT_EQ(models_->Arrive(InPlace(model)), Arrived::kOnTime);
  const Closing closing = CloseKept();
  EXPECT_EQ(closing.contributions[kRank].gradients, 1);
  EXPECT_TRUE(closing.contributions[kRank].stale);
  EXPECT_THAT(Sent(models_->Begin(closing, kRank)), ElementsAre(1, 2));
}

TEST_F(KeptModelTest, OneThatIsTooOldIsLeftOut) {
  OnTime({1, 2}, 8);
  EXPECT_EQ(models_->ReportPending(), 1);
  const Bucket::Entry entry = models_->Begin(CloseModels({0, false}), kRank);
  EXPECT_THAT(Sent(entry), Each(0));
  Reduce(entry, 6);
  models_->Finish();
  EXPECT_THAT(Late({3, 3}), Each(3)) << "the mean of the others' two and its own";
  EXPECT_THAT(Miss(0), Each(3)) << "there is a newer one";
}

TEST_F(KeptModelTest, AGroupWithoutAnyModelHasNoResult) {
  Closing closing = CloseModels({0, false});
  closing.contributions.assign(kSize, {0, false});
  const Bucket::Entry entry = models_->Begin(closing, kRank);
  Values model = {1, 2};
  EXPECT_EQ(models_->Arrive(InPlace(model)), Arrived::kWaiting);
  Reduce(entry, 0);
  models_->Finish();
  EXPECT_FALSE(models_->HasMissed());
  models_->TakeMissed(model.data());
  EXPECT_THAT(model, ElementsAre(1, 2)) << "an average with nobody else";
}

TEST_F(KeptModelTest, OnlyTheGroupCounts) {
  Values model = {1, 2};
  models_->Arrive(InPlace(model));
  Closing closing = CloseModels({models_->ReportArrival(), true});
  closing.groups = {0, 1, 1};
  Reduce(models_->Begin(closing, kRank), 3);
  models_->Finish();
  EXPECT_THAT(model, ElementsAre(2, 2.5)) << "2 models";
  closing = CloseKept();
  closing.groups = {0, 1, 0};
  Reduce(models_->Begin(closing, kRank), 0);
  models_->Finish();
  EXPECT_THAT(Late({3, 4}), ElementsAre(2, 3)) << "the old one and the new one";
}

TEST_F(KeptModelTest, WithoutADivisorItIsThePlainSum) {
  MakeBucket(Divisor::kNone);
  EXPECT_THAT(OnTime({1, 2}, 8), ElementsAre(9, 10));
  Miss(5);
  EXPECT_THAT(Late({10, 20}), ElementsAre(6, 7)) << "of what was sent, without the new one";
  EXPECT_THAT(Miss(5), ElementsAre(10, 20));
}

TEST_F(KeptModelTest, ClearForgetsTheModelAndTheMissedResult) {
  OnTime({1, 2}, 8);
  Miss(5);
  Late({3, 4});
  models_->Clear();
  EXPECT_EQ(models_->ReportPending(), 0);
  EXPECT_FALSE(models_->HasMissed());
  EXPECT_TRUE(models_->wants_full_round());
  EXPECT_THAT(OnTime({5, 6}, 8), ElementsAre(FloatEq(13 / 3.F), FloatEq(14 / 3.F)));
  EXPECT_FALSE(models_->wants_full_round());
  EXPECT_THAT(Miss(5), ElementsAre(5, 6));
}

TEST_F(KeptModelTest, WhatWasAnnouncedBeforeAClearIsSentOnceMore) {
  OnTime({1, 2}, 8);
  const Closing closing = CloseKept();
  models_->Clear();
  const Bucket::Entry entry = models_->Begin(closing, kRank);
  EXPECT_THAT(Sent(entry), ElementsAre(1, 2));
  Reduce(entry, 5);
  models_->Finish();
  EXPECT_EQ(models_->ReportPending(), 0);
  EXPECT_THAT(Miss(5), Each(0));
}

TEST_F(KeptModelTest, AClearWhileRunningDiscardsTheResult) {
  OnTime({1, 2}, 8);
  const Bucket::Entry entry = models_->Begin(CloseKept(), kRank);
  models_->Clear();
  EXPECT_THAT(Sent(entry), ElementsAre(1, 2)) << "what is being sent is not written";
  Reduce(entry, 5);
  models_->Finish();
  EXPECT_FALSE(models_->HasMissed());
  EXPECT_EQ(models_->ReportPending(), 0);
}

TEST_F(KeptModelTest, NothingIsPendingThatARoundWouldHaveToDeliver) {
  OnTime({1, 2}, 8);
  Miss(5);
  Late({3, 4});
  EXPECT_FALSE(models_->HasPending());
}

TEST_F(KeptModelTest, HoldsAtMostFiveTimesItsSize) {
  for (int i = 0; i < 20; ++i) {
    if (!models_->HasMissed()) OnTime({1, 2}, 8);
    Miss(5);
    const Bucket::Entry entry = models_->Begin(CloseKept(), kRank);
    Values model = {1, 2};
    models_->Arrive(InPlace(model));
    Reduce(entry, 5);
    models_->Finish();
    EXPECT_LE(models_->held_bytes(), 5 * models_->bytes());
    models_->TakeMissed(model.data());
    if (i % 3 == 0) Miss(5);
  }
}

// --- A join

TEST_F(BucketTest, AnArrivalOfARankThatJoinsIsReportedAgain) {
  BecomeLate();
  Values values = {5, 6};
  bucket_.Arrive(InPlace(values));
  EXPECT_EQ(bucket_.ReportArrival(), 2);
  bucket_.Unreport();
  EXPECT_FALSE(bucket_.reported());
  EXPECT_EQ(bucket_.ReportArrival(), 2) << "what was pending is in it already";
  const Bucket::Entry entry = bucket_.Begin(CloseWith(), kRank);
  EXPECT_TRUE(entry.own);
  EXPECT_THAT(Sent(entry), ElementsAre(6, 8));
}

// --- Rounds that leave this rank out

class LeftOutTest : public BucketTest {
 protected:
  void MakeBucket(Late late) {
    BucketOptions options = Options();
    options.late = late;
    options.missed = Missed::kLatest;
    options.divisor = Divisor::kContributors;
    grouped_.emplace("grouped", options);
  }
  Closing CloseGroups(const Partition& groups) {
    Closing closing = Close({0, false});
    closing.groups = groups;
    for (std::size_t rank = 0; rank < groups.size(); ++rank)
      closing.contributions[rank] = {groups[rank] == kNoGroup ? 0 : 1, groups[rank] != kNoGroup};
    return closing;
  }
  // Round 0, of all.
  void RunRoundZero() {
    Values model = {1, 2};
    EXPECT_EQ(grouped_->Arrive(InPlace(model)), Arrived::kOnTime);
    Reduce(grouped_->Begin(Close({grouped_->ReportArrival(), true}), kRank), 8);
    EXPECT_TRUE(grouped_->Finish());
  }
  std::optional<Bucket> grouped_;
};

TEST_F(LeftOutTest, AnIdleRankIsNotDisturbed) {
  MakeBucket(Late::kDiscard);
  RunRoundZero();
  const Bucket::Entry entry = grouped_->Begin(CloseGroups({0, kNoGroup, 0}), kRank);
  EXPECT_FALSE(entry.member);
  EXPECT_FALSE(entry.own);
  EXPECT_EQ(entry.input, nullptr);
  EXPECT_EQ(grouped_->state(), State::kIdle);
  EXPECT_FALSE(grouped_->HasMissed());
  EXPECT_EQ(grouped_->held_bytes(), 0u);
  EXPECT_EQ(grouped_->last().round, 0) << "the last one that it was in";
}

TEST_F(LeftOutTest, AnArrivalGoesOnWaiting) {
  MakeBucket(Late::kDiscard);
  RunRoundZero();
  Values model = {3, 4};
  EXPECT_EQ(grouped_->Arrive(InPlace(model)), Arrived::kOnTime);
  grouped_->Begin(CloseGroups({0, kNoGroup, 0}), kRank);  // it slipped in
  EXPECT_EQ(grouped_->state(), State::kArrived);
  EXPECT_EQ(grouped_->ReportArrival(), 1);
  const Bucket::Entry left_out = grouped_->Begin(CloseGroups({0, kNoGroup, 0}), kRank);  // others were first
  EXPECT_FALSE(left_out.member);
  EXPECT_TRUE(grouped_->reported());
  const Bucket::Entry entry = grouped_->Begin(CloseGroups({kNoGroup, 0, 0}), kRank);
  EXPECT_TRUE(entry.own);
  EXPECT_EQ(entry.input, model.data());
  Reduce(entry, 5);
  EXPECT_TRUE(grouped_->Finish());
  EXPECT_THAT(model, ElementsAre(4, 4.5));
  EXPECT_EQ(grouped_->completed(), 4);
  EXPECT_EQ(grouped_->held_bytes(), 0u);
}

TEST_F(LeftOutTest, AFlushOfNobodyIsNoRound) {
  MakeBucket(Late::kKeep);
  RunRoundZero();
  EXPECT_FALSE(grouped_->Begin(CloseGroups({kNoGroup, kNoGroup, kNoGroup}), kRank).member);
  EXPECT_EQ(grouped_->completed(), 1);
  EXPECT_EQ(grouped_->ReportPending(), 1) << "the model is still there";
}

TEST_F(LeftOutTest, RoundsOfOthersCountAsCompleted) {
  MakeBucket(Late::kDiscard);
  RunRoundZero();
  grouped_->Begin(CloseGroups({0, kNoGroup, 0}), kRank);
  grouped_->Begin(CloseGroups({0, kNoGroup, 0}), kRank);
  EXPECT_EQ(grouped_->completed(), 3);
}

// --- Weights

class WeightsTest : public BucketTest {
 protected:
  void MakeBucket(Weights weights, double parameter) {
    BucketOptions options = Options();
    options.weights = weights;
    options.weight_parameter = parameter;
    options.late = Late::kDiscard;
    options.missed = Missed::kLatest;
    options.divisor = Divisor::kContributors;
    weighted_.emplace("weighted", options);
  }
  Closing CloseWithWork(const std::vector<int>& work) {
    Closing closing = Close({weighted_->ReportArrival(), true});
    for (std::size_t rank = 0; rank < kSize; ++rank) closing.contributions[rank].work = work[rank];
    return closing;
  }
  std::optional<Bucket> weighted_;
};

TEST_F(WeightsTest, ContractionScalesTheOwnContribution) {
  MakeBucket(Weights::kContraction, 0.5);
  Values model = {7, 14};
  weighted_->Arrive({model.data(), model.data(), 1, 9});
  EXPECT_EQ(weighted_->arrival().work, 9);
  const Bucket::Entry entry = weighted_->Begin(CloseWithWork({10, 9, 8}), kRank);
  EXPECT_THAT(Sent(entry), ElementsAre(FloatEq(2), FloatEq(4))) << "2 / 7 of it";
  Reduce(entry, 1);
  EXPECT_TRUE(weighted_->Finish());
  EXPECT_THAT(model, ElementsAre(FloatEq(3), FloatEq(5))) << "the sum is the average";
}

TEST_F(WeightsTest, TheApplicationsInputIsNotScaled) {
  MakeBucket(Weights::kContraction, 0.5);
  const Values input = {7, 14};
  Values output(2);
  weighted_->Arrive({input.data(), output.data(), 1, 9});
  const Bucket::Entry entry = weighted_->Begin(CloseWithWork({10, 9, 8}), kRank);
  EXPECT_EQ(entry.input, output.data());
  EXPECT_THAT(Sent(entry), ElementsAre(FloatEq(2), FloatEq(4)));
  EXPECT_THAT(input, ElementsAre(7, 14));
}

TEST_F(WeightsTest, WhoIsNotFreshHasNone) {
  MakeBucket(Weights::kContraction, 0.5);
  Values model = {6, 12};
  weighted_->Arrive({model.data(), model.data(), 1, 9});
  Closing closing = CloseWithWork({10, 9, 8});
  closing.contributions[2] = {};
  EXPECT_THAT(Sent(weighted_->Begin(closing, kRank)), ElementsAre(FloatEq(2), FloatEq(4))) << "1 / 3 of it";
}

TEST_F(WeightsTest, OnlyTheGroupHasAny) {
  MakeBucket(Weights::kContraction, 0.5);
  Values model = {6, 12};
  weighted_->Arrive({model.data(), model.data(), 1, 9});
  Closing closing = CloseWithWork({10, 9, 8});
  closing.groups = {0, 1, 1};
  EXPECT_THAT(Sent(weighted_->Begin(closing, kRank)), ElementsAre(FloatEq(4), FloatEq(8))) << "2 / 3 of it";
}

TEST_F(WeightsTest, AMissedAverageIsNotDivided) {
  MakeBucket(Weights::kContraction, 0.5);
  Closing closing = Close({0, false});
  Reduce(weighted_->Begin(closing, kRank), 5);
  weighted_->Finish();
  Values model = {1, 2};
  EXPECT_EQ(weighted_->Arrive(InPlace(model)), Arrived::kLate);
  weighted_->TakeMissed(model.data());
  EXPECT_THAT(model, Each(5));
}

TEST_F(WeightsTest, StalenessCountsIterationsAndGoesToTheNewest) {
  MakeBucket(Weights::kStaleness, 0.9);
  Values model = {1, 1};
  weighted_->Arrive(InPlace(model));
  EXPECT_EQ(weighted_->arrival().work, 1);
  weighted_->Begin(CloseWithWork({1, 1, 1}), kRank);
  EXPECT_THAT(model, Each(FloatEq(1 / 3.F)));
  weighted_->Finish();
  model = {1, 1};
  weighted_->Arrive(InPlace(model));
  EXPECT_EQ(weighted_->arrival().work, 2);
  weighted_->Begin(CloseWithWork({4, 2, 4}), kRank);  // lags 0, 2, 0
  EXPECT_THAT(model, Each(testing::FloatNear(0.299F, 5e-4F)));
  weighted_->Finish();
  EXPECT_EQ(weighted_->iteration(), 4);
  weighted_->Arrive(InPlace(model));
  EXPECT_EQ(weighted_->arrival().work, 5);
}

TEST_F(WeightsTest, CatchesUpToAnIterationAndNeverFallsBack) {
  MakeBucket(Weights::kStaleness, 0.9);
  Values model = {1, 1};
  EXPECT_EQ(weighted_->CatchUp(0), 0);
  EXPECT_EQ(weighted_->CatchUp(7), 7);
  weighted_->Arrive(InPlace(model));
  EXPECT_EQ(weighted_->arrival().work, 8);
  EXPECT_EQ(weighted_->CatchUp(3), 8);
}

TEST_F(WeightsTest, OfOtherGroupsTheIterationIsNotTaken) {
  MakeBucket(Weights::kStaleness, 0.9);
  Values model = {1, 1};
  weighted_->Arrive(InPlace(model));
  Closing closing = CloseWithWork({7, 1, 3});
  closing.groups = {0, 1, 1};
  weighted_->Begin(closing, kRank);
  EXPECT_EQ(weighted_->iteration(), 3);
}

// --- Memory

TEST_F(BucketTest, HoldsAtMostThreeTimesItsSizeWithMissedSum) {
  for (int i = 0; i < 20; ++i) {
    MissRound(1);
    if (i % 3 == 0) continue;
    const Closing closing = CloseWithout();
    Values values = {1, 2};
    bucket_.Arrive(InPlace(values));
    Take();
    const Bucket::Entry entry = bucket_.Begin(closing, kRank);
    Values more = {3, 4};
    bucket_.Arrive(InPlace(more));
    Reduce(entry, 1);
    bucket_.Finish();
    EXPECT_LE(bucket_.held_bytes(), 3 * bucket_.bytes());
    Take();
    EXPECT_LE(bucket_.held_bytes(), 3 * bucket_.bytes());
  }
}

TEST(EmptyBucketTest, RunsThroughARoundWithoutElements) {
  Bucket bucket("empty", BucketOptions{});
  float nowhere = 0;
  EXPECT_EQ(bucket.Arrive({&nowhere, &nowhere, 1}), Arrived::kOnTime);
  Closing closing;
  closing.contributions = {{bucket.ReportArrival(), true}};
  bucket.Begin(closing, 0);
  EXPECT_TRUE(bucket.Finish());
}

}  // namespace
}  // namespace horovod_partial
