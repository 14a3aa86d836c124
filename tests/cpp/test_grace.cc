#include <gtest/gtest.h>

#include "core/quorum/policy.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;

GraceEstimator AfterSteps(Time step, int count = 10) {
  GraceEstimator estimator;
  for (int i = 0; i < count; ++i) estimator.RecordStep(step);
  return estimator;
}

TEST(GraceTest, IsZeroUntilItHasSeenStepsAndLags) {
  GraceEstimator only_lags;
  only_lags.RecordLag(1ms);
  EXPECT_EQ(GraceEstimator().Estimate(), 0ms);
  EXPECT_EQ(only_lags.Estimate(), 0ms);
  EXPECT_EQ(AfterSteps(100ms).Estimate(), 0ms);
}

TEST(GraceTest, CoversTheLongestLagThatIsWorthIt) {
  GraceEstimator estimator = AfterSteps(100ms);  // the cap is 5 ms
  for (const Time lag : {Time(1ms), Time(4ms), Time(2ms)}) estimator.RecordLag(lag);
  EXPECT_EQ(estimator.Estimate(), 4ms);
}

TEST(GraceTest, DoesNotReachForARareSlowRank) {
  GraceEstimator estimator = AfterSteps(100ms);
  for (const Time lag : {Time(1ms), Time(3ms), Time(60ms)}) estimator.RecordLag(lag);
  EXPECT_EQ(estimator.Estimate(), 3ms);
}

TEST(GraceTest, IsZeroWhereMostComeLaterThanTheCap) {
  GraceEstimator estimator = AfterSteps(100ms);
  for (const Time lag : {Time(1ms), Time(60ms)}) estimator.RecordLag(lag);
  EXPECT_EQ(estimator.Estimate(), 0ms) << "half is not most";
  estimator.RecordLag(1ms);
  EXPECT_EQ(estimator.Estimate(), 1ms);
}

TEST(GraceTest, TheCapIsFivePercentOfTheMedianStep) {
  GraceEstimator estimator = AfterSteps(100ms, 3);
  estimator.RecordStep(10s);  // an evaluation between two epochs does not raise it
  estimator.RecordLag(5ms);
  EXPECT_EQ(estimator.Estimate(), 5ms) << "the cap itself still counts";
  GraceEstimator beyond = AfterSteps(100ms);
  beyond.RecordLag(5ms + 1ns);
  EXPECT_EQ(beyond.Estimate(), 0ms);
}

TEST(GraceTest, ForgetsWhatIsLongAgo) {
  GraceEstimator estimator = AfterSteps(100ms);
  for (int i = 0; i < 64; ++i) estimator.RecordLag(60ms);
  EXPECT_EQ(estimator.Estimate(), 0ms);
  for (int i = 0; i < 64; ++i) estimator.RecordLag(2ms);
  EXPECT_EQ(estimator.Estimate(), 2ms);
  for (int i = 0; i < 64; ++i) estimator.RecordStep(20ms);  // steps have become short: 2 ms would be too much
  EXPECT_EQ(estimator.Estimate(), 0ms);
}

}  // namespace
}  // namespace horovod_partial
