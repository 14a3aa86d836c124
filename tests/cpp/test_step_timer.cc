#include <gtest/gtest.h>

#include <cmath>

#include "core/slowness/step_timer.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
using Steps = std::vector<TimedStep>;

TEST(ArrivalStepsTest, AStepComputesFromTheLastResultToTheLastArrival) {
  ArrivalSteps steps;
  steps.Arrived(0, 10ms);
  steps.Got(15ms);
  steps.Arrived(1, 40ms);
  steps.Arrived(1, 45ms);
  steps.Got(46ms);
  steps.Waited(45ms, 47ms, true);
  EXPECT_TRUE(steps.Take().empty()) << "the begin of the first step is unknown, and the second one may go on";
  steps.Arrived(2, 60ms);
  EXPECT_EQ(steps.Take(), (Steps{{1, 0.030}}));
  steps.Arrived(3, 90ms);
  EXPECT_EQ(steps.Take(), (Steps{{2, 0.013}}));
}

TEST(ArrivalStepsTest, WaitsForHorovodAreNoCompute) {
  ArrivalSteps steps;
  steps.Arrived(0, 10ms);
  steps.Got(10ms);
  steps.Waited(15ms, 18ms, false);
  steps.Waited(12ms, 22ms, false);  // on another thread
  steps.Arrived(1, 30ms);
  steps.Got(31ms);
  steps.Arrived(2, 40ms);
  EXPECT_EQ(steps.Take(), (Steps{{1, 0.010}}));
}

TEST(ArrivalStepsTest, AWaitThatGoesOnAfterTheLastArrivalCountsUpToIt) {
  ArrivalSteps steps;
  steps.Arrived(0, 0ms);
  steps.Got(0ms);
  steps.Arrived(1, 20ms);
  steps.Waited(15ms, 40ms, true);
  steps.Arrived(2, 50ms);
  EXPECT_EQ(steps.Take(), (Steps{{1, 0.015}}));
}

TEST(ArrivalStepsTest, MicroBatchesWithOneResultTogetherBeginOneAfterTheOther) {
  ArrivalSteps steps;
  for (int micro_batch = 0; micro_batch < 4; ++micro_batch)
    steps.Arrived(micro_batch, std::chrono::milliseconds(100 + 10 * micro_batch));
  EXPECT_EQ(steps.Take(), (Steps{{1, 0.010}, {2, 0.010}}));
}

TEST(ReductionStepsTest, AStepComputesUntilItsLastTensorsWereSeen) {
  ReductionSteps steps;
  steps.Handed(5ms);
  steps.Reduced(0, 6ms, 10ms);
  steps.Handed(20ms);
  steps.Reduced(1, 21ms, 25ms);
  steps.Handed(30ms);
  steps.Reduced(1, 38ms, 40ms);
  steps.Handed(60ms);
  steps.Reduced(2, 61ms, 62ms);
  EXPECT_EQ(steps.Take(), (Steps{{1, 0.020}}));
  steps.Handed(70ms);
  steps.Reduced(3, 71ms, 72ms);
  EXPECT_EQ(steps.Take(), (Steps{{2, 0.020}}));
}

TEST(ReductionStepsTest, ARankThatHasJoinedTakesNoSteps) {
  ReductionSteps steps;
  steps.Handed(5ms);
  steps.Reduced(0, 6ms, 10ms);
  steps.Reduced(1, 21ms, 25ms);
  steps.Reduced(2, 31ms, 35ms);
  EXPECT_TRUE(steps.Take().empty());
}

TEST(StepTimerTest, TheStepsAreThoseOfMostBytes) {
  StepTimer timer;
  timer.Arrived(0, 1ms, 100);
  timer.Got(2ms);
  timer.Handed(1ms);
  timer.Reduced(0, 1ms, 2ms, 8);
  timer.Arrived(1, 12ms, 100);
  timer.Got(13ms);
  timer.Handed(3ms);
  timer.Reduced(1, 3ms, 4ms, 8);
  timer.Arrived(2, 20ms, 100);
  timer.Reduced(2, 5ms, 6ms, 8);
  EXPECT_EQ(timer.Take(), (StepReport{{{1, 0.010}}, 324}));
  timer.Reduced(3, 50ms, 60ms, 10'000);
  timer.Handed(70ms);
  timer.Reduced(4, 71ms, 72ms, 10'000);
  timer.Reduced(5, 81ms, 82ms, 10'000);
  EXPECT_EQ(timer.Take(), (StepReport{{{4, 0.010}}, 30'000}));
}

TEST(StepTimerTest, StepsThatNobodyTakesAreBounded) {
  StepTimer timer;
  for (int step = 0; step < 100'000; ++step) {
    timer.Arrived(step, std::chrono::milliseconds(2 * step), 1);
    timer.Got(std::chrono::milliseconds(2 * step));
  }
  EXPECT_LT(timer.Take().ended.size(), 10'000U);
}

using Rows = std::vector<std::vector<double>>;
constexpr std::size_t kAll = 1'000'000;

TEST(StepRowsTest, AreThereWhenAllRanksHaveTheStep) {
  StepRows rows(2);
  rows.Add(0, {{1, 0.1}, {2, 0.2}});
  rows.Add(1, {{0, 0.0}});
  ASSERT_EQ(rows.Take(kAll).size(), 1U);
  EXPECT_TRUE(rows.Take(kAll).empty());
  rows.Add(1, {{1, 0.3}});
  EXPECT_EQ(rows.Take(kAll), (Rows{{0.1, 0.3}}));
  rows.Add(1, {{2, 0.4}});
  EXPECT_EQ(rows.Take(kAll), (Rows{{0.2, 0.4}}));
}

TEST(StepRowsTest, AStepThatARankLacksShiftsNothing) {
  StepRows rows(2);
  rows.Add(0, {{1, 0.1}, {2, 0.2}, {3, 0.3}});
  rows.Add(1, {{1, 0.5}, {3, 0.7}});
  const Rows taken = rows.Take(kAll);
  ASSERT_EQ(taken.size(), 3U);
  EXPECT_TRUE(std::isnan(taken[1][1]));
  EXPECT_EQ(taken[2], (std::vector<double>{0.3, 0.7}));
}

TEST(StepRowsTest, NobodyWaitsForARankThatIsOut) {
  StepRows rows(3);
  rows.SetOut(1, true);
  rows.Add(0, {{1, 0.1}});
  rows.Add(2, {{1, 0.3}});
  const Rows taken = rows.Take(kAll);
  ASSERT_EQ(taken.size(), 1U);
  EXPECT_TRUE(std::isnan(taken[0][1]));
  for (const Rank rank : {0, 2}) rows.SetOut(rank, true);
  EXPECT_TRUE(rows.Take(kAll).empty());
}

TEST(StepRowsTest, ARankIsWaitedForFromItsFirstStepOn) {
  StepRows rows(2);
  rows.Add(0, {{1, 0.1}});
  for (int i = 1; i < StepRows::kPatience; ++i) EXPECT_TRUE(rows.Take(kAll).empty());
  EXPECT_EQ(rows.Take(kAll).size(), 1U);
  rows.Add(1, {{1, 0.5}, {2, 0.6}});
  EXPECT_TRUE(rows.Take(kAll).empty());
  rows.Add(0, {{2, 0.2}});
  const Rows taken = rows.Take(kAll);
  ASSERT_EQ(taken.size(), 2U);
  EXPECT_TRUE(std::isnan(taken[0][0])) << "this step was taken before";
  EXPECT_EQ(taken[1], (std::vector<double>{0.2, 0.6}));
}

TEST(StepRowsTest, ARankThatHasMissedStepsInAJoinIsLinedUpAgain) {
  StepRows rows(2);
  rows.Add(0, {{1, 0.1}});
  rows.Add(1, {{1, 0.1}});
  EXPECT_EQ(rows.Take(kAll).size(), 1U);
  rows.SetOut(1, true);
  rows.Add(0, {{2, 0.2}, {3, 0.3}});
  EXPECT_EQ(rows.Take(kAll).size(), 2U);
  rows.SetOut(1, false);
  rows.Add(1, {{2, 0.7}, {3, 0.8}});
  rows.Add(0, {{4, 0.4}, {5, 0.5}});
  EXPECT_EQ(rows.Take(kAll), (Rows{{0.4, 0.7}, {0.5, 0.8}}));
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
  EXPECT_EQ(rows.Take(kAll).size(), 1U);
  std::size_t equal = 0;
  std::int64_t next[] = {0, 0};
  for (int beat = 0; beat < 20; ++beat) {
    const Rank rank = beat % 2;
    std::vector<TimedStep> steps;
    for (int i = 0; i < 1000; ++i, ++next[rank]) steps.push_back({next[rank], static_cast<double>(next[rank])});
    rows.Add(rank, steps);
    for (const auto& row : rows.Take(kAll)) equal += row[0] == row[1] ? 1 : 0;
  }
  EXPECT_EQ(equal, 10'000U);
}

TEST(StepRowsTest, ARankThatIsFarAheadIsComparedWithLaterSteps) {
  StepRows rows(2);
  for (const Rank rank : {0, 1}) rows.Add(rank, {{-1, 0}});
  EXPECT_EQ(rows.Take(kAll).size(), 1U);
  std::vector<TimedStep> steps;
  for (int i = 0; i < 10'000; ++i) steps.push_back({i, static_cast<double>(i)});
  rows.Add(0, steps);
  EXPECT_TRUE(rows.Take(kAll).empty());
  rows.Add(1, {{0, 7}});
  EXPECT_EQ(rows.Take(kAll), (Rows{{10'000.0 - StepRows::kMostAhead, 7}}));
}

}  // namespace
}  // namespace horovod_partial
