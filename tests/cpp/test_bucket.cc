#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
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
  EXPECT_FALSE(entry.retract);
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
  EXPECT_FALSE(entry.retract);
  EXPECT_THAT(Sent(entry), Each(0));
  Reduce(entry, 5);
  EXPECT_FALSE(bucket_.Finish());
  EXPECT_TRUE(bucket_.HasMissed());
  EXPECT_EQ(bucket_.missed_rounds(), 1);
}

TEST_F(BucketTest, LateTakesTheResultAndLeavesItsContributionPending) {
  MissRound(5);
  MissRound(7);
  Values values = {1, 2};
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kLate);
  EXPECT_EQ(bucket_.state(), State::kIdle);
  EXPECT_EQ(bucket_.missed_rounds(), 2);
  EXPECT_TRUE(bucket_.TakeMissed(values.data()).empty());
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

TEST_F(BucketTest, ASlippedArrivalIsRetractedAndBecomesLate) {
  const Closing closing = CloseWithout();
  Values values = {1, 2};
  EXPECT_EQ(bucket_.Arrive(InPlace(values)), Arrived::kOnTime);
  const Bucket::Entry entry = bucket_.Begin(closing, kRank);
  EXPECT_TRUE(entry.retract);
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
  EXPECT_TRUE(entry.retract);
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
  EXPECT_TRUE(entry.retract);
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

TEST(BucketMissedTest, ReplayReturnsAllButTheNewest) {
  BucketOptions options;
  options.elements = 1;
  options.missed = Missed::kReplay;
  Bucket bucket("bucket", options);
  for (Round round = 0; round < 3; ++round) {
    Closing closing;
    closing.round = round;
    closing.contributions = {{0, false}, {1, true}};
    *static_cast<float*>(bucket.Begin(closing, 0).output) = static_cast<float>(round + 1);
    bucket.Finish();
  }
  float newest = 0;
  const std::deque<Buffer> earlier = bucket.TakeMissed(&newest);
  EXPECT_EQ(newest, 3);
  ASSERT_EQ(earlier.size(), 2u);
  EXPECT_EQ(*static_cast<const float*>(earlier[0].data()), 1);
  EXPECT_EQ(*static_cast<const float*>(earlier[1].data()), 2);
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
  void MakeBucket(bool drop_results = false) {
    BucketOptions options = Options();
    options.drop_nonfinite = true;
    options.drop_nonfinite_results = drop_results;
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

TEST_F(NonFiniteTest, ButDroppedAndCountedWhereThatIsAskedFor) {
  MakeBucket(true);
  Miss(kInfinity);
  EXPECT_EQ(dropping_->dropped(), 1);
  EXPECT_FALSE(dropping_->HasMissed());
  Miss(5);
  Values taken(2);
  dropping_->TakeMissed(taken.data());
  EXPECT_THAT(taken, Each(5));
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
