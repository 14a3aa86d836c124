#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "core/slowness/step_timer.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
class StepTimerTest : public testing::Test {
 protected:
  // A contribution of 100 bytes, and 10 for each number of the bucket.
  void Arrive(std::int64_t bucket, Time time) {
    timer_.Arrived({std::to_string(bucket)}, bucket, time, static_cast<std::size_t>(100 + 10 * bucket));
  }
  void Get(std::int64_t bucket, Time time, Round round = 0) { timer_.Got(bucket, time, round, false, 0); }
  // A contribution that has its result at once.
  void ArriveAndGet(Time time) {
    Arrive(0, time);
    Get(0, time);
  }
  // A reduction of Horovod's own, of tensors that were seen before.
  void Reduce(const std::string& name, Time seen, Time begin, Time end) {
    timer_.Arrived({name}, -1, seen, 8);
    timer_.Got(-1, end, -1, false, 0);
    timer_.Reduced(begin, end);
  }
  const Step& Last() const { return steps_.back(); }

  std::vector<Step> steps_;
  StepTimer timer_{[this](const Step& step) { steps_.push_back(step); }};
};

TEST_F(StepTimerTest, AStepComputesFromTheLastResultToTheLastArrival) {
  ArriveAndGet(10ms);
  timer_.Waited(10ms, 15ms, true);
  Arrive(0, 40ms);
  Arrive(1, 45ms);
  timer_.Got(1, 46ms, 7, false, 3);
  timer_.Got(0, 47ms, 6, true, 2);
  timer_.Waited(45ms, 48ms, true);
  ArriveAndGet(60ms);
  ASSERT_EQ(steps_.size(), 1U) << "the second step has just closed";
  EXPECT_FALSE(Last().begin) << "nothing tells when the first step began";
  ArriveAndGet(90ms);
  ASSERT_EQ(steps_.size(), 2U);
  EXPECT_EQ(std::tuple(Last().number, Last().bucket, Last().bytes), std::tuple(1, 1, 210U));
  EXPECT_EQ(std::tuple(*Last().begin, Last().handed, Last().result), std::tuple(15ms, 45ms, 47ms));
  EXPECT_EQ(std::tuple(Last().round, Last().late, Last().staleness), std::tuple(7, true, 3));
  StepReport taken = timer_.Take();
  EXPECT_EQ(taken.ended, (std::vector<TimedStep>{{1, 0.030}}));
  EXPECT_DOUBLE_EQ(taken.seconds, 0.033) << "until the next step begins";
  timer_.Flush();
  taken = timer_.Take();
  EXPECT_EQ(taken.ended, (std::vector<TimedStep>{{2, 0.012}, {3, 0.030}}));
  EXPECT_DOUBLE_EQ(taken.seconds, 0.042);
  ArriveAndGet(500ms);
  timer_.Flush();
  EXPECT_FALSE(Last().begin) << "a pause is no step";
}

TEST_F(StepTimerTest, TimeInWaitsIsNoCompute) {
  ArriveAndGet(10ms);
  timer_.Waited(15ms, 18ms, false);
  timer_.Waited(12ms, 22ms, false);  // on another thread
  ArriveAndGet(30ms);
  ArriveAndGet(40ms);
  timer_.Waited(28ms, 45ms, false);  // had begun before the second step closed
  ArriveAndGet(50ms);
  EXPECT_EQ(Last().blocked, 12ms);
  EXPECT_EQ(timer_.Take().ended, (std::vector<TimedStep>{{1, 0.008}}));
}

TEST_F(StepTimerTest, ReductionsCountWhileTheApplicationWaits) {
  ArriveAndGet(0ms);
  timer_.Waited(2ms, 6ms, false);
  timer_.Reduced(1ms, 4ms);
  Arrive(0, 10ms);
  timer_.Reduced(8ms, 13ms);
  Get(0, 15ms);
  timer_.Flush();
  EXPECT_EQ(Last().reduced, 2ms + 3ms);
}

TEST_F(StepTimerTest, AStepWithoutItsResultIsKeptBack) {
  ArriveAndGet(0ms);
  Arrive(0, 10ms);
  Arrive(1, 20ms);
  Arrive(1, 30ms);
  Get(1, 31ms);
  EXPECT_EQ(steps_.size(), 1U);
  timer_.Flush();
  EXPECT_EQ(steps_.size(), 1U);
}

TEST_F(StepTimerTest, MicroBatchesWithOneResultBeginOneAfterTheOther) {
  ArriveAndGet(90ms);
  for (int micro_batch = 0; micro_batch < 3; ++micro_batch)
    Arrive(0, std::chrono::milliseconds(100 + 10 * micro_batch));
  timer_.Reduced(105ms, 125ms);
  EXPECT_EQ(steps_.size(), 1U);
  Get(0, 126ms, 5);
  timer_.Flush();
  ASSERT_EQ(steps_.size(), 4U);
  for (std::size_t row = 1; row < 4; ++row)
    EXPECT_EQ(std::tuple(steps_[row].round, steps_[row].result), std::tuple(5, 126ms));
  EXPECT_EQ(steps_[2].reduced, 0ms) << "the rank was computing the next one";
  EXPECT_EQ(steps_[3].reduced, 5ms);
  EXPECT_EQ(timer_.Take().ended, (std::vector<TimedStep>{{1, 0.010}, {2, 0.010}, {3, 0.010}}));
}

TEST_F(StepTimerTest, AStepOfReductionsComputesUntilItsLastTensorsWereSeen) {
  Reduce("a", 5ms, 6ms, 10ms);
  Reduce("a", 20ms, 21ms, 25ms);
  Reduce("b", 30ms, 38ms, 40ms);
  Reduce("a", 60ms, 61ms, 62ms);
  timer_.Flush();
  EXPECT_EQ(std::tuple(Last().bucket, Last().round, Last().reduced), std::tuple(-1, -1, 1ms));
  EXPECT_EQ(timer_.Take().ended, (std::vector<TimedStep>{{1, 0.020}, {2, 0.020}}));
}

TEST_F(StepTimerTest, ARankThatHasJoinedTakesNoSteps) {
  Reduce("a", 5ms, 6ms, 10ms);
  for (int step = 1; step < 4; ++step) {
    const Time begin = std::chrono::milliseconds(10 * step);
    Reduce("a", 5ms, begin, begin + 5ms);
  }
  Reduce("a", 50ms, 51ms, 55ms);
  Reduce("a", 60ms, 61ms, 65ms);
  timer_.Flush();
  ASSERT_EQ(steps_.size(), 3U);
  EXPECT_FALSE(steps_[1].begin) << "it has come back";
  EXPECT_EQ(timer_.Take().ended, (std::vector<TimedStep>{{5, 0.005}}));
}

TEST_F(StepTimerTest, WhatNobodyTakesIsBounded) {
  Arrive(1, 0ms);  // never has a result
  for (int step = 0; step < 100'000; ++step) ArriveAndGet(std::chrono::milliseconds(2 * step));
  EXPECT_LT(timer_.Take().ended.size(), 10'000U);
  EXPECT_GT(steps_.size(), 90'000U);
}

// The program's side of a step's parts. Iterator 0 is that of the training, and 7 that of an evaluation.
class PartsTest : public StepTimerTest {
 protected:
  void Ask(Time begin, Time end, std::int64_t iterator = 0) { timer_.Marked({iterator, begin, end, true}); }
  void Optimize(Time end) { timer_.Marked({Mark::kOptimizer, end, end, false}); }
  // A step of 100 ms that begins at `at`: the optimizer takes 10 ms, and the forward pass `forward`.
  void TakeStep(Time at, Time loader, Time forward, Time backward) {
    Optimize(at + 10ms);
    Ask(at + 10ms, at + 10ms + loader);
    Arrive(0, at + 10ms + loader + forward);
    Arrive(1, at + 10ms + loader + forward + backward);
    for (const std::int64_t bucket : {0, 1}) Get(bucket, at + 100ms);
  }
  // The parts of step 1, in milliseconds, after a step before it and one behind it.
  std::vector<double> PartsOfStep1() {
    timer_.Flush();
    std::vector<double> parts;
    for (const TimedStep& step : timer_.Take().ended)
      if (step.number == 1)
        for (const double seconds : step.parts.seconds) parts.push_back(seconds < 0 ? -1 : std::round(1e3 * seconds));
    return parts;
  }
};
using Milliseconds = std::vector<double>;  // loader, forward, backward, optimizer, other

TEST_F(PartsTest, AStepIsSplitByItsBatchItsGradientsAndTheOptimizer) {
  TakeStep(0ms, 5ms, 10ms, 20ms);
  TakeStep(100ms, 15ms, 20ms, 30ms);
  TakeStep(200ms, 5ms, 10ms, 20ms);
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{15, 20, 30, 10, 0}));
}

TEST_F(PartsTest, AnEvaluationIsOtherWorkWithItsLoader) {
  TakeStep(0ms, 5ms, 10ms, 20ms);
  Optimize(110ms);
  for (int batch = 0; batch < 3; ++batch) Ask(115ms + batch * 10ms, 120ms + batch * 10ms, 7);
  timer_.Waited(142ms, 144ms, false);
  Ask(150ms, 155ms);
  Arrive(0, 165ms);
  Arrive(1, 180ms);
  for (const std::int64_t bucket : {0, 1}) Get(bucket, 190ms);
  TakeStep(200ms, 5ms, 10ms, 20ms);
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{5, 10, 15, 10, 38}));
}

TEST_F(PartsTest, TheLastBatchOfAnEpochAndTheFirstOfTheNextAreTheTrainings) {
  TakeStep(0ms, 5ms, 10ms, 20ms);
  Optimize(110ms);
  timer_.Marked({1, 110ms, 130ms, false});  // the next epoch makes its iterator
  Ask(130ms, 135ms, 1);
  ArriveAndGet(150ms);
  Optimize(160ms);
  Ask(160ms, 161ms, 1);
  ArriveAndGet(170ms);
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{25, 15, 0, 10, 0}));
}

TEST_F(PartsTest, TwoLoadersAreBothWaitedFor) {
  for (int step = 0; step < 3; ++step) {
    const Time at = step * 100ms;
    Optimize(at + 10ms);
    Ask(at + 12ms, at + 20ms, 0);
    Ask(at + 20ms, at + 21ms, 1);
    ArriveAndGet(at + 50ms);
  }
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{9, 29, 0, 60, 2})) << "the optimizer's step lasts since the last result";
}

TEST_F(PartsTest, PassesOfAccumulatedGradientsAreNotToldApart) {
  TakeStep(0ms, 5ms, 10ms, 20ms);
  Optimize(110ms);
  Ask(110ms, 115ms);
  Ask(135ms, 140ms);
  ArriveAndGet(160ms);
  TakeStep(200ms, 5ms, 10ms, 20ms);
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{10, -1, 40, 10, 0}));
}

TEST_F(PartsTest, AStepOfALocalOptimizerBelongsToThePasses) {
  TakeStep(0ms, 5ms, 10ms, 20ms);
  Ask(102ms, 112ms);
  Optimize(140ms);
  ArriveAndGet(150ms);  // the model is averaged
  TakeStep(200ms, 5ms, 10ms, 20ms);
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{10, -1, 38, -1, 2}));
}

TEST_F(PartsTest, WorkBetweenTheOptimizersStepAndAMetricIsOther) {
  for (int step = 0; step < 3; ++step) {
    const Time at = step * 100ms;
    Ask(at + 2ms, at + 5ms);
    Arrive(0, at + 20ms);
    Get(0, at + 25ms);
    timer_.Waited(at + 20ms, at + 25ms, false);
    Optimize(at + 30ms);
    Arrive(1, at + 70ms);  // an average of the loss
    Get(1, at + 100ms);
  }
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{3, 15, 5, -1, 42}));
}

TEST_F(PartsTest, BetweenTwoOptimizersIsNoOtherWork) {
  for (int step = 0; step < 3; ++step) {
    const Time at = step * 100ms;
    Optimize(at + 5ms);  // of the generator, in the step before
    Ask(at + 5ms, at + 10ms);
    Arrive(0, at + 20ms);
    Get(0, at + 25ms);
    Optimize(at + 30ms);  // of the discriminator
    Arrive(1, at + 70ms);
    Get(1, at + 100ms);
  }
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{5, 10, 50, 5, 0}));
}

TEST_F(PartsTest, NothingIsSaidWithoutBatchesOfTheTraining) {
  const auto take = [&](Time at, bool asks) {
    Optimize(at + 10ms);
    if (asks) Ask(at + 10ms, at + 12ms, 7);  // an evaluation, in one step only
    ArriveAndGet(at + 50ms);
  };
  take(0ms, false);
  take(100ms, true);
  take(200ms, false);
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{-1, -1, -1, -1, -1}));
}

TEST_F(PartsTest, ABatchThatIsAskedForBehindTheGradientsIsOfALaterStep) {
  for (int step = 0; step < 3; ++step) {
    const Time at = step * 100ms;
    Arrive(0, at + 40ms);
    Ask(at + 42ms, at + 45ms);
    Arrive(1, at + 50ms);
    for (const std::int64_t bucket : {0, 1}) Get(bucket, at + 90ms);
    Optimize(at + 95ms);
  }
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{-1, -1, -1, -1, -1}));
}

TEST_F(PartsTest, TheOptimizerIsUnknownWhereItsStepIsNeverSeen) {
  for (int step = 0; step < 3; ++step) {
    Ask(step * 100ms + 20ms, step * 100ms + 25ms);
    ArriveAndGet(step * 100ms + 60ms);
  }
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{5, 35, 0, -1, 60}));
}

TEST_F(PartsTest, GradientsOfHorovodsOwnReductionsAreSeenBeforeTheyAreReduced) {
  for (int step = 0; step < 3; ++step) {
    const Time at = step * 100ms;
    Optimize(at + 10ms);
    Ask(at + 10ms, at + 15ms);
    timer_.Handed(at + 30ms);
    timer_.Handed(at + 45ms);
    Reduce("a", at + 45ms, at + 50ms, at + 60ms);
  }
  EXPECT_EQ(PartsOfStep1(), (Milliseconds{5, 15, 15, 50, 0}));
}

TEST_F(PartsTest, MicroBatchesOfAnUpdateHaveTheirOwnParts) {
  ArriveAndGet(0ms);
  Optimize(1ms);
  for (int micro_batch = 1; micro_batch < 4; ++micro_batch) {
    const Time at = micro_batch * 10ms;
    Ask(at - 8ms, at - 6ms);
    Arrive(0, at);
  }
  Get(0, 50ms);
  timer_.Flush();
  const auto steps = timer_.Take().ended;
  ASSERT_EQ(steps.size(), 3U);
  EXPECT_NEAR(steps[1].parts[Part::kOther], 0.002, 1e-9);
  EXPECT_NEAR(steps[1].parts[Part::kLoader], 0.002, 1e-9);
  EXPECT_NEAR(steps[1].parts[Part::kForward], 0.006, 1e-9);
  EXPECT_EQ(steps[1].parts[Part::kOptimizer], 0) << "its step is not in this micro-batch";
}

TEST(StepCounterTest, WhatComesAgainBeginsAStep) {
  StepCounter steps;
  EXPECT_EQ(steps.Count({"a", "b"}), 0);
  EXPECT_EQ(steps.Count({"c"}), 0);
  EXPECT_EQ(steps.Count({"c"}), 1) << "in another order than in the step before";
  EXPECT_EQ(steps.Count({"b", "a"}), 1);
  EXPECT_EQ(steps.Count({"new", "b"}), 2);
}

using Rows = std::vector<std::vector<double>>;
// Takes all rows, without their parts.
Rows Taken(StepRows& rows) {
  Rows taken;
  for (const StepRows::Row& row : rows.Take(1'000'000)) taken.push_back(row.seconds);
  return taken;
}

TEST(StepRowsTest, AreThereWhenAllRanksHaveTheStep) {
  StepRows rows(2);
  rows.Add(0, {{1, 0.1}, {2, 0.2}});
  rows.Add(1, {{0, 0.0}});
  ASSERT_EQ(Taken(rows).size(), 1U);
  EXPECT_TRUE(Taken(rows).empty());
  rows.Add(1, {{1, 0.3}});
  EXPECT_EQ(Taken(rows), (Rows{{0.1, 0.3}}));
  rows.Add(1, {{2, 0.4}});
  EXPECT_EQ(Taken(rows), (Rows{{0.2, 0.4}}));
}

TEST(StepRowsTest, AStepThatARankLacksShiftsNothing) {
  StepRows rows(2);
  rows.Add(0, {{1, 0.1}, {2, 0.2}, {3, 0.3}});
  rows.Add(1, {{1, 0.5}, {3, 0.7}});
  const Rows taken = Taken(rows);
  ASSERT_EQ(taken.size(), 3U);
  EXPECT_TRUE(std::isnan(taken[1][1]));
  EXPECT_EQ(taken[2], (std::vector<double>{0.3, 0.7}));
}

TEST(StepRowsTest, NobodyWaitsForARankThatIsOut) {
  StepRows rows(3);
  rows.SetOut(1, true);
  rows.Add(0, {{1, 0.1}});
  rows.Add(2, {{1, 0.3}});
  const Rows taken = Taken(rows);
  ASSERT_EQ(taken.size(), 1U);
  EXPECT_TRUE(std::isnan(taken[0][1]));
  for (const Rank rank : {0, 2}) rows.SetOut(rank, true);
  EXPECT_TRUE(Taken(rows).empty());
}

TEST(StepRowsTest, ARankIsWaitedForFromItsFirstStepOn) {
  StepRows rows(2);
  rows.Add(0, {{1, 0.1}});
  for (int i = 1; i < StepRows::kPatience; ++i) EXPECT_TRUE(Taken(rows).empty());
  EXPECT_EQ(Taken(rows).size(), 1U);
  rows.Add(1, {{1, 0.5}, {2, 0.6}});
  EXPECT_TRUE(Taken(rows).empty());
  rows.Add(0, {{2, 0.2}});
  const Rows taken = Taken(rows);
  ASSERT_EQ(taken.size(), 2U);
  EXPECT_TRUE(std::isnan(taken[0][0])) << "this step was taken before";
  EXPECT_EQ(taken[1], (std::vector<double>{0.2, 0.6}));
}

TEST(StepRowsTest, ARankThatHasMissedStepsInAJoinIsLinedUpAgain) {
  StepRows rows(2);
  rows.Add(0, {{1, 0.1}});
  rows.Add(1, {{1, 0.1}});
  EXPECT_EQ(Taken(rows).size(), 1U);
  rows.SetOut(1, true);
  rows.Add(0, {{2, 0.2}, {3, 0.3}});
  EXPECT_EQ(Taken(rows).size(), 2U);
  rows.SetOut(1, false);
  rows.Add(1, {{2, 0.7}, {3, 0.8}});
  rows.Add(0, {{4, 0.4}, {5, 0.5}});
  EXPECT_EQ(Taken(rows), (Rows{{0.4, 0.7}, {0.5, 0.8}}));
}

TEST(StepRowsTest, NoMoreRowsAreTakenThanAreWanted) {
  StepRows rows(1);
  rows.Add(0, {{1, 0.1}, {2, 0.2}, {3, 0.3}});
  EXPECT_EQ(rows.Take(2).size(), 2U);
  EXPECT_EQ(rows.Take(2).size(), 1U);
}

TEST(StepRowsTest, HeartbeatsOfFastRanksComeAtTheirOwnTimes) {
  StepRows rows(2);
  for (const Rank rank : {0, 1}) rows.Add(rank, {{-1, 0}});
  EXPECT_EQ(Taken(rows).size(), 1U);
  std::size_t equal = 0;
  std::int64_t next[] = {0, 0};
  for (int beat = 0; beat < 20; ++beat) {
    const Rank rank = beat % 2;
    std::vector<TimedStep> steps;
    for (int i = 0; i < 1000; ++i, ++next[rank]) steps.push_back({next[rank], static_cast<double>(next[rank])});
    rows.Add(rank, steps);
    for (const auto& row : Taken(rows)) equal += row[0] == row[1] ? 1 : 0;
  }
  EXPECT_EQ(equal, 10'000U);
}

TEST(StepRowsTest, ARankThatIsFarAheadIsComparedWithLaterSteps) {
  StepRows rows(2);
  for (const Rank rank : {0, 1}) rows.Add(rank, {{-1, 0}});
  EXPECT_EQ(Taken(rows).size(), 1U);
  std::vector<TimedStep> steps;
  for (int i = 0; i < 10'000; ++i) steps.push_back({i, static_cast<double>(i)});
  rows.Add(0, steps);
  EXPECT_TRUE(Taken(rows).empty());
  rows.Add(1, {{0, 7}});
  EXPECT_EQ(Taken(rows), (Rows{{10'000.0 - StepRows::kMostAhead, 7}}));
}

}  // namespace
}  // namespace horovod_partial
