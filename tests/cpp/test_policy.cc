#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/quorum/policy.h"
#include "harness/policies.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
using test::RandomInitiator;
using testing::Each;
using testing::ElementsAre;

// Pearson's statistic of counts that should be equal.
double ChiSquare(const std::vector<int>& counts, int draws) {
  const double expected = static_cast<double>(draws) / static_cast<double>(counts.size());
  double sum = 0;
  for (const int count : counts) sum += (count - expected) * (count - expected) / expected;
  return sum;
}

TEST(InitiatorTest, IsTheSameWhereverItIsComputed) {
  // Stored numbers: ranks of one job may run on different machines, and jobs are compared across versions.
  std::vector<Rank> drawn;
  for (Round round = 0; round < 12; ++round) drawn.push_back(Initiator(RandomInitiator(7), round, 8));
  EXPECT_THAT(drawn, ElementsAre(7, 4, 2, 3, 2, 1, 6, 6, 1, 1, 3, 4));
}

TEST(InitiatorTest, IsUniformOverTheRanks) {
  constexpr int kDraws = 40000;
  for (const int size : {2, 3, 8, 17}) {
    for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}}) {
      std::vector<int> counts(static_cast<std::size_t>(size));
      for (Round round = 0; round < kDraws; ++round)
        ++counts[static_cast<std::size_t>(Initiator(RandomInitiator(seed), round, size))];
      EXPECT_LT(ChiSquare(counts, kDraws), 45) << size << " ranks, seed " << seed;  // 16 degrees of freedom: p < 0.0002
    }
  }
}

TEST(InitiatorTest, ConsecutiveDrawsAreIndependent) {
  constexpr int kDraws = 40000;
  constexpr int kSize = 4;
  std::vector<int> pairs(kSize * kSize);
  for (Round round = 0; round < kDraws; ++round) {
    const int first = Initiator(RandomInitiator(3), round, kSize);
    const int second = Initiator(RandomInitiator(3), round + 1, kSize);
    ++pairs[static_cast<std::size_t>(first * kSize + second)];
  }
  EXPECT_LT(ChiSquare(pairs, kDraws), 45);
}

TEST(InitiatorTest, DependsOnTheSeed) {
  int equal = 0;
  for (Round round = 0; round < 1000; ++round)
    equal += Initiator(RandomInitiator(1), round, 10) == Initiator(RandomInitiator(2), round, 10) ? 1 : 0;
  EXPECT_GT(equal, 50);
  EXPECT_LT(equal, 150);
}

TEST(InitiatorTest, OfOneRankIsThatRank) {
  std::vector<Rank> drawn;
  for (Round round = 0; round < 10; ++round) drawn.push_back(Initiator(RandomInitiator(5), round, 1));
  EXPECT_THAT(drawn, Each(0));
}

// --- Grace

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
  struct {
    std::vector<Time> lags;
    Time grace;
    const char* what;
  } const cases[] = {
      {{1ms, 4ms, 2ms}, 4ms, "the longest"},  {{1ms, 3ms, 60ms}, 3ms, "not that of a rare slow rank"},
      {{1ms, 60ms}, 0ms, "half is not most"}, {{1ms, 60ms, 1ms}, 1ms, "most come before the cap"},
      {{5ms + 1ns}, 0ms, "beyond the cap"},
  };
  for (const auto& [lags, grace, what] : cases) {
    GraceEstimator estimator = AfterSteps(100ms);  // the cap is 5 ms
    for (const Time lag : lags) estimator.RecordLag(lag);
    EXPECT_EQ(estimator.Estimate(), grace) << what;
  }
}

TEST(GraceTest, TheCapIsFivePercentOfTheMedianStep) {
  GraceEstimator estimator = AfterSteps(100ms, 3);
  estimator.RecordStep(10s);  // an evaluation between two epochs does not raise it
  estimator.RecordLag(5ms);
  EXPECT_EQ(estimator.Estimate(), 5ms) << "the cap itself still counts";
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
