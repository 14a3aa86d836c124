// One bucket: numbers, memory and errors. That nothing is lost or comes twice, in whatever order ranks report, arrive,
// clear and deliver, test_exhaustive.cc explores, with the same buckets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

#include "core/rounds/bucket.h"

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

BucketOptions Plain() {
  BucketOptions options;
  options.elements = 2;
  return options;
}

template <typename Value>
BucketOptions With(Value Handling::* option, Value value) {
  BucketOptions options = Plain();
  options.*option = value;
  return options;
}

// Averages of models.
BucketOptions Models(Late late = Late::kKeep, Divisor divisor = Divisor::kContributors) {
  BucketOptions options = Plain();
  options.late = late;
  options.missed = Missed::kLatest;
  options.divisor = divisor;
  return options;
}

// A bucket of 2 floats on rank 1 of 3. The other ranks are made up: a test says what their contributions add up to.
class BucketTest : public testing::Test {
 protected:
  explicit BucketTest(const BucketOptions& options = Plain()) { Make(options); }
  void Make(const BucketOptions& options) { bucket_.emplace("bucket", options); }

  static Bucket::Arrival InPlace(Values& values, int gradients = 1) {
    return {values.data(), values.data(), gradients};
  }

  // This rank's part in the closing; each of the others contributes one fresh gradient.
  Closing Close(Closing::Contribution mine) {
    Closing closing;
    closing.bucket = bucket_->name();
    closing.round = next_round_++;
    closing.contributions.assign(kSize, {1, true});
    closing.contributions[kRank] = mine;
    return closing;
  }
  Closing CloseWithout() {
    const int gradients = bucket_->ReportPending();
    return Close({gradients, false, gradients > 0 && bucket_->ReportLate() == 0});
  }
  Closing CloseWith() { return Close({bucket_->ReportArrival(), true}); }
  Bucket::Entry Begin(const Closing& closing) { return bucket_->Begin(closing, kRank); }

  // What the transport does: the entry's input, and what the others send, goes to its output. Then the round ends.
  bool End(const Bucket::Entry& entry, float others) {
    const auto* input = static_cast<const float*>(entry.input);
    auto* output = static_cast<float*>(entry.output);
    for (std::size_t i = 0; i < 2; ++i) output[i] = input[i] + others;
    return bucket_->Finish();
  }
  static Values Sent(const Bucket::Entry& entry) {
    const auto* input = static_cast<const float*>(entry.input);
    return {input, input + 2};
  }

  // A whole round for which this rank is on time, and what it gets.
  Values OnTime(Values values, float others) {
    EXPECT_EQ(bucket_->Arrive(InPlace(values)), Arrived::kOnTime);
    EXPECT_TRUE(End(Begin(CloseWith()), others));
    return values;
  }
  // A whole round that this rank misses, and what it sends.
  Values Miss(float others) {
    const Bucket::Entry entry = Begin(CloseWithout());
    const Values sent = Sent(entry);
    EXPECT_FALSE(End(entry, others));
    return sent;
  }
  // A late arrival, and what it gets.
  Values ArriveLate(Values values) {
    EXPECT_EQ(bucket_->Arrive(InPlace(values)), Arrived::kLate);
    bucket_->TakeMissed(values.data());
    return values;
  }
  // An arrival while a round runs.
  void ArriveMeanwhile(Values& values) { EXPECT_EQ(bucket_->Arrive(InPlace(values)), Arrived::kWaiting); }
  // Makes this rank late by one gradient of {1, 2}, having taken a result of {10, 10}.
  void BecomeLate() {
    Miss(10);
    ArriveLate({1, 2});
  }
  Values Take(Values values = Values(2)) {
    bucket_->TakeMissed(values.data());
    return values;
  }

  std::optional<Bucket> bucket_;
  Round next_round_ = 0;
};

// --- An arrival that is on time

TEST_F(BucketTest, OnTimeGoesThroughAllStates) {
  Values values = {1, 2};
  EXPECT_EQ(bucket_->Arrive(InPlace(values)), Arrived::kOnTime);
  EXPECT_EQ(bucket_->state(), State::kArrived);
  EXPECT_FALSE(bucket_->reported());
  EXPECT_EQ(bucket_->ReportArrival(), 1);
  EXPECT_TRUE(bucket_->reported());
  const Bucket::Entry entry = Begin(CloseWith());
  EXPECT_EQ(bucket_->state(), State::kRunning);
  EXPECT_TRUE(bucket_->declared());
  EXPECT_TRUE(End(entry, 5));
  EXPECT_EQ(bucket_->state(), State::kIdle);
  EXPECT_EQ(bucket_->completed(), 1);
  EXPECT_THAT(values, ElementsAre(6, 7)) << "the plain sum, by default";
  EXPECT_FALSE(bucket_->HasMissed());
}

TEST_F(BucketTest, OnTimeIsSentFromWhereItLies) {
  for (const auto late : {Late::kAccumulate, Late::kKeep}) {
    Make(With(&Handling::late, late));
    Values input = {1, 2}, output(2);
    bucket_->Arrive({input.data(), output.data(), 1});
    const Bucket::Entry entry = Begin(CloseWith());
    EXPECT_EQ(entry.input, input.data());
    EXPECT_EQ(entry.output, output.data());
  }
}

TEST_F(BucketTest, ReportingTwiceChangesNothing) {
  BecomeLate();
  Values values = {10, 20};
  bucket_->Arrive(InPlace(values));
  EXPECT_EQ(bucket_->ReportArrival(), 2);
  EXPECT_EQ(bucket_->ReportArrival(), 2);
  EXPECT_EQ(bucket_->ReportPending(), 0) << "it has gone into the arrival";
  EXPECT_THAT(values, ElementsAre(11, 22));
}

TEST_F(BucketTest, ASecondArrivalIsRefused) {
  Values values = {1, 2};
  bucket_->Arrive(InPlace(values));
  EXPECT_EQ(bucket_->Arrive(InPlace(values)), Arrived::kBusy);
  Begin(CloseWith());
  EXPECT_EQ(bucket_->Arrive(InPlace(values)), Arrived::kBusy) << "also while its round is running";
  EXPECT_FALSE(bucket_->HasPending());
}

// --- Late

TEST_F(BucketTest, LateTakesTheResultsAndLeavesItsContributionPending) {
  EXPECT_THAT(Miss(5), Each(0)) << "without an arrival zeros are sent";
  EXPECT_THAT(Miss(7), Each(0));
  EXPECT_TRUE(bucket_->HasMissed());
  EXPECT_EQ(bucket_->missed_rounds(), 2);
  EXPECT_THAT(ArriveLate({1, 2}), Each(12));
  EXPECT_EQ(bucket_->state(), State::kIdle);
  EXPECT_FALSE(bucket_->HasMissed());
  EXPECT_TRUE(bucket_->HasPending());
  EXPECT_EQ(bucket_->ReportPending(), 1);
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

TEST_F(BucketTest, PendingTravelsWithTheNextArrival) {
  BecomeLate();
  const Values input = {10, 20};
  Values output(2, -1);
  ASSERT_EQ(bucket_->Arrive({input.data(), output.data(), 1}), Arrived::kOnTime);
  const Closing closing = CloseWith();
  EXPECT_EQ(closing.contributions[kRank].gradients, 2);
  const Bucket::Entry entry = Begin(closing);
  EXPECT_THAT(Sent(entry), ElementsAre(11, 22));
  EXPECT_THAT(input, ElementsAre(10, 20)) << "the application's gradient is not ours to write";
  EXPECT_EQ(entry.output, output.data());
  EXPECT_FALSE(bucket_->HasPending());
}

TEST_F(BucketTest, AClosingThatCannotBeIsAnError) {
  EXPECT_THROW(Begin(Close({1, true})), std::logic_error) << "nothing has arrived";
  EXPECT_THROW(Begin(Close({1, false})), std::logic_error) << "nothing was announced";
  Values values = {1, 2};
  bucket_->Arrive(InPlace(values));
  bucket_->ReportArrival();
  EXPECT_THROW(Begin(Close({0, false})), std::logic_error) << "an arrival is left out that was reported";
  Begin(CloseWith());
  EXPECT_THROW(Begin(CloseWithout()), std::logic_error) << "a round runs";
}

// --- Arrivals that only deliver

TEST_F(BucketTest, AnArrivalWithoutInputDeliversWhatIsPending) {
  Values lent = {9, 9};
  EXPECT_EQ(bucket_->Arrive({nullptr, lent.data(), 0}), Arrived::kOnTime);
  const Closing nothing = CloseWith();
  EXPECT_EQ(nothing.contributions[kRank].gradients, 0);
  const Bucket::Entry entry = Begin(nothing);
  EXPECT_THAT(Sent(entry), Each(0));
  End(entry, 10);
  ArriveLate({1, 2});
  EXPECT_EQ(bucket_->Arrive({nullptr, lent.data(), 0}), Arrived::kOnTime);
  const Closing closing = CloseWith();
  EXPECT_EQ(closing.contributions[kRank].gradients, 1);
  EXPECT_THAT(Sent(Begin(closing)), ElementsAre(1, 2));
}

// --- Members of families

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
  // The next round ends here, with this result.
  void EndRound(float result) {
    Closing closing;
    closing.round = bucket_.completed();
    const int own = bucket_.reported() ? bucket_.arrival().gradients : bucket_.ReportPending();
    closing.contributions = {{own, bucket_.reported()}, {1, true}};
    *static_cast<float*>(bucket_.Begin(closing, 0).output) = result;
    bucket_.Finish();
  }
  float Take(int rounds, int gradients) {
    float taken = -1;
    EXPECT_EQ(bucket_.TakeRounds(rounds, &taken), gradients);
    return taken;
  }
  Bucket bucket_{"bucket", Options()};
  float value_ = 1;
};

TEST_F(MemberTest, TheResultOfAnArrivalIsTheOldestAndLiesWhereItWasWanted) {
  EXPECT_EQ(bucket_.Arrive({&value_, &value_, 1}), Arrived::kOnTime);
  bucket_.ReportArrival();
  EndRound(7);
  EXPECT_EQ(value_, 7);
  EndRound(8);
  EXPECT_EQ(bucket_.untaken(), 2);
  EXPECT_EQ(bucket_.Arrive({&value_, &value_, 1}), Arrived::kBusy) << "it has not been taken";
  EXPECT_FALSE(bucket_.Writes(1, &value_));
  EXPECT_TRUE(bucket_.Writes(2, &value_)) << "the second result is added to the first";
  float elsewhere = 0;
  EXPECT_TRUE(bucket_.Writes(1, &elsewhere));
  EXPECT_EQ(Take(1, 2), 7);
  EXPECT_TRUE(bucket_.Writes(1, &value_)) << "the rank has missed this one";
  EXPECT_EQ(Take(1, 1), 8);
}

TEST_F(MemberTest, BeyondTheLimitTheOldestComeAsOne) {
  for (const float result : {1.F, 2.F, 3.F, 4.F, 5.F}) EndRound(result);
  EXPECT_EQ(bucket_.untaken(), 5);
  EXPECT_EQ(bucket_.oldest_rounds(), 3);
  EXPECT_EQ(bucket_.summed(), 2);
  EXPECT_EQ(Take(3, 3), 6);
}

// --- Clear

TEST_F(BucketTest, ClearAsksForAFullRound) {
  EXPECT_FALSE(bucket_->wants_full_round());
  bucket_->Clear();
  EXPECT_FALSE(bucket_->wants_full_round()) << "round 0 is one anyway";
  Miss(5);
  bucket_->Clear();
  EXPECT_TRUE(bucket_->wants_full_round());
  Miss(5);
  EXPECT_TRUE(bucket_->wants_full_round()) << "until it has taken part in one";
  Take();
  OnTime({1, 2}, 0);
  EXPECT_FALSE(bucket_->wants_full_round());
}

TEST_F(BucketTest, AClearWhileADeliveryRunsDiscardsTheResult) {
  BecomeLate();
  Values lent(2);
  ASSERT_EQ(bucket_->Arrive({nullptr, lent.data()}), Arrived::kOnTime);
  const Bucket::Entry entry = Begin(CloseWith());
  bucket_->Clear();
  EXPECT_FALSE(End(entry, 10));
  EXPECT_FALSE(bucket_->HasMissed());
}

// --- Options

class DivisorTest : public BucketTest {
 protected:
  DivisorTest() : BucketTest(With(&Handling::divisor, Divisor::kContributors)) {}
  // One round, of which this rank's part is `mine`, the others' `others` each; every gradient is {6, 6}.
  Values Run(Closing::Contribution mine, Closing::Contribution others) {
    Values values = {6, 6};
    if (mine.fresh) {
      bucket_->Arrive(InPlace(values));
      bucket_->ReportArrival();
    }
    Closing closing = Close(mine);
    closing.contributions[0] = closing.contributions[2] = others;
    return End(Begin(closing), 6.f * static_cast<float>(2 * others.gradients)) ? values : Take();
  }
};

TEST_F(DivisorTest, DividesByTheGradientsInTheSum) {
  EXPECT_THAT(Run({1, true}, {1, true}), Each(6)) << "3 of them";
  EXPECT_THAT(Run({1, true}, {0, false}), Each(6)) << "1";
  EXPECT_THAT(Run({0, false}, {1, true}), Each(6)) << "2, none of them its own";
  EXPECT_THAT(Run({1, true}, {3, false}), Each(FloatEq(6))) << "7, most of them pending ones";
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class NonFiniteTest : public BucketTest {
 protected:
  NonFiniteTest() : BucketTest(With(&Handling::drop_nonfinite, true)) {}
};

TEST_F(NonFiniteTest, ALateContributionIsDroppedAndCounted) {
  Miss(5);
  ArriveLate({1, kInfinity});
  EXPECT_EQ(bucket_->dropped(), 1);
  EXPECT_FALSE(bucket_->HasPending());
}

TEST_F(NonFiniteTest, SoIsOneThatSlippedIn) {
  const Closing closing = Close({0, false});
  Values values = {1, std::numeric_limits<float>::quiet_NaN()};
  bucket_->Arrive(InPlace(values));
  End(Begin(closing), 5);
  EXPECT_EQ(bucket_->dropped(), 1);
  EXPECT_EQ(bucket_->ReportPending(), 0);
}

TEST_F(NonFiniteTest, OneThatIsOnTimeIsSent) {
  Values values = {1, kInfinity};  // the GradScaler of every rank shall see it, and skip the step
  bucket_->Arrive(InPlace(values));
  EXPECT_EQ(bucket_->ReportArrival(), 1);
  EXPECT_EQ(bucket_->dropped(), 0);
}

TEST_F(NonFiniteTest, AMissedResultIsKept) {
  Miss(kInfinity);
  EXPECT_EQ(bucket_->dropped(), 0);
  EXPECT_TRUE(bucket_->HasMissed());
}

TEST_F(BucketTest, ALateContributionThatIsDiscardedIsNotDelivered) {
  Make(With(&Handling::late, Late::kDiscard));
  Miss(5);
  EXPECT_THAT(ArriveLate({1, 2}), Each(5));
  EXPECT_FALSE(bucket_->HasPending());
  EXPECT_THAT(OnTime({3, 4}, 0), ElementsAre(3, 4));
}

// --- Models that are kept

class KeptModelTest : public BucketTest {
 protected:
  KeptModelTest() : BucketTest(Models()) {}
};

TEST_F(KeptModelTest, OnTimeIsTheMean) { EXPECT_THAT(OnTime({1, 2}, 8), ElementsAre(3, FloatEq(10 / 3.F))); }

// C3 of WAGMA-SGD, with the models of a group of 2.
TEST_F(KeptModelTest, LateIsTheSumWithTheOldModelAndTheNewOne) {
  OnTime({1, 2}, 8);
  Closing closing = CloseWithout();
  closing.contributions[2] = {0, false};  // rank 0 and this one
  const Bucket::Entry entry = Begin(closing);
  EXPECT_THAT(Sent(entry), ElementsAre(1, 2)) << "the model that was there last stands in";
  End(entry, 6);  // rank 0's; it gets (6 + 1) / 2 of this
  EXPECT_THAT(ArriveLate({10, 20}), ElementsAre(FloatEq((1 + 6 + 10) / 3.F), FloatEq((2 + 6 + 20) / 3.F)));
}

TEST_F(KeptModelTest, AGroupWithoutAnyModelHasNoResult) {
  Closing closing = Close({0, false});
  closing.contributions.assign(kSize, {0, false});
  const Bucket::Entry entry = Begin(closing);
  Values model = {1, 2};
  ArriveMeanwhile(model);
  End(entry, 0);
  EXPECT_FALSE(bucket_->HasMissed());
  EXPECT_THAT(Take(model), ElementsAre(1, 2)) << "an average with nobody else";
}

TEST_F(KeptModelTest, OnlyTheGroupCounts) {
  Values model = {1, 2};
  bucket_->Arrive(InPlace(model));
  Closing closing = CloseWith();
  closing.groups = {0, 1, 1};
  End(Begin(closing), 3);
  EXPECT_THAT(model, ElementsAre(2, 2.5)) << "2 models";
  closing = CloseWithout();
  closing.groups = {0, 1, 0};
  End(Begin(closing), 0);
  EXPECT_THAT(ArriveLate({3, 4}), ElementsAre(2, 3)) << "the old one and the new one";
}

// --- A join

TEST_F(BucketTest, AnArrivalOfARankThatJoinsIsReportedAgain) {
  BecomeLate();
  Values values = {5, 6};
  bucket_->Arrive(InPlace(values));
  EXPECT_EQ(bucket_->ReportArrival(), 2);
  bucket_->Unreport();
  EXPECT_FALSE(bucket_->reported());
  EXPECT_EQ(bucket_->ReportArrival(), 2) << "what was pending is in it already";
  const Bucket::Entry entry = Begin(CloseWith());
  EXPECT_EQ(entry.input, values.data());
  EXPECT_THAT(Sent(entry), ElementsAre(6, 8));
}

// --- Weights

class WeightsTest : public BucketTest {
 protected:
  static BucketOptions Options(Weights weights, double parameter) {
    BucketOptions options = Models(Late::kDiscard);
    options.weights = weights;
    options.weight_parameter = parameter;
    return options;
  }
  WeightsTest() : BucketTest(Options(Weights::kContraction, 0.5)) {}
  Closing CloseWithWork(const std::vector<int>& work) {
    Closing closing = CloseWith();
    for (std::size_t rank = 0; rank < kSize; ++rank) closing.contributions[rank].work = work[rank];
    return closing;
  }
};

TEST_F(WeightsTest, ContractionScalesTheOwnContribution) {
  Values model = {7, 14};
  bucket_->Arrive({model.data(), model.data(), 1, 9});
  EXPECT_EQ(bucket_->arrival().work, 9);
  const Bucket::Entry entry = Begin(CloseWithWork({10, 9, 8}));
  EXPECT_THAT(Sent(entry), ElementsAre(FloatEq(2), FloatEq(4))) << "2 / 7 of it";
  EXPECT_TRUE(End(entry, 1));
  EXPECT_THAT(model, ElementsAre(FloatEq(3), FloatEq(5))) << "the sum is the average";
}

TEST_F(WeightsTest, TheApplicationsInputIsNotScaled) {
  const Values input = {7, 14};
  Values output(2);
  bucket_->Arrive({input.data(), output.data(), 1, 9});
  const Bucket::Entry entry = Begin(CloseWithWork({10, 9, 8}));
  EXPECT_EQ(entry.input, output.data());
  EXPECT_THAT(Sent(entry), ElementsAre(FloatEq(2), FloatEq(4)));
  EXPECT_THAT(input, ElementsAre(7, 14));
}

TEST_F(WeightsTest, WhoIsNotFreshHasNone) {
  Values model = {6, 12};
  bucket_->Arrive({model.data(), model.data(), 1, 9});
  Closing closing = CloseWithWork({10, 9, 8});
  closing.contributions[2] = {};
  EXPECT_THAT(Sent(Begin(closing)), ElementsAre(FloatEq(2), FloatEq(4))) << "1 / 3 of it";
}

TEST_F(WeightsTest, OnlyTheGroupHasAny) {
  Values model = {6, 12};
  bucket_->Arrive({model.data(), model.data(), 1, 9});
  Closing closing = CloseWithWork({10, 9, 8});
  closing.groups = {0, 1, 1};
  EXPECT_THAT(Sent(Begin(closing)), ElementsAre(FloatEq(4), FloatEq(8))) << "2 / 3 of it";
}

TEST_F(WeightsTest, AMissedAverageIsNotDivided) {
  Miss(5);
  EXPECT_THAT(ArriveLate({1, 2}), Each(5));
}

TEST_F(WeightsTest, StalenessCountsIterationsAndGoesToTheNewest) {
  Make(Options(Weights::kStaleness, 0.9));
  Values model = {1, 1};
  bucket_->Arrive(InPlace(model));
  EXPECT_EQ(bucket_->arrival().work, 1);
  Begin(CloseWithWork({1, 1, 1}));
  EXPECT_THAT(model, Each(FloatEq(1 / 3.F)));
  bucket_->Finish();
  model = {1, 1};
  bucket_->Arrive(InPlace(model));
  EXPECT_EQ(bucket_->arrival().work, 2);
  Begin(CloseWithWork({4, 2, 4}));  // lags 0, 2, 0
  EXPECT_THAT(model, Each(testing::FloatNear(0.299F, 5e-4F)));
  bucket_->Finish();
  EXPECT_EQ(bucket_->CatchUp(0), 4);
  bucket_->Arrive(InPlace(model));
  EXPECT_EQ(bucket_->arrival().work, 5);
}

TEST_F(WeightsTest, CatchesUpToAnIterationAndNeverFallsBack) {
  Make(Options(Weights::kStaleness, 0.9));
  Values model = {1, 1};
  EXPECT_EQ(bucket_->CatchUp(0), 0);
  EXPECT_EQ(bucket_->CatchUp(7), 7);
  bucket_->Arrive(InPlace(model));
  EXPECT_EQ(bucket_->arrival().work, 8);
  EXPECT_EQ(bucket_->CatchUp(3), 8);
}

TEST_F(WeightsTest, OfOtherGroupsTheIterationIsNotTaken) {
  Make(Options(Weights::kStaleness, 0.9));
  Values model = {1, 1};
  bucket_->Arrive(InPlace(model));
  Closing closing = CloseWithWork({7, 1, 3});
  closing.groups = {0, 1, 1};
  Begin(closing);
  EXPECT_EQ(bucket_->CatchUp(0), 3);
}

// --- Memory

TEST_F(BucketTest, HoldsAtMostThreeTimesItsSizeOrFiveTimesWithAKeptModel) {
  for (const bool keeps : {false, true}) {
    Make(keeps ? Models() : Plain());
    const auto expect_bounded = [&] { EXPECT_LE(bucket_->held_bytes(), (keeps ? 5 : 3) * bucket_->bytes()); };
    for (int i = 0; i < 20; ++i) {
      if (i % 4 == 0) OnTime({1, 2}, 8);
      Miss(1);
      if (i % 3 == 0) Miss(1);
      const Closing closing = CloseWithout();
      ArriveLate({1, 2});
      const Bucket::Entry entry = Begin(closing);
      Values more = {3, 4};
      bucket_->Arrive(InPlace(more));
      End(entry, 1);
      expect_bounded();
      Take();
      expect_bounded();
    }
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
