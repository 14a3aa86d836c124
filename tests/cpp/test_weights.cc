#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "core/groups/weights.h"

namespace horovod_partial {
namespace {

using testing::DoubleEq;
using testing::DoubleNear;
using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

double Sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

class RandomWorkTest : public testing::Test {
 protected:
  std::vector<int> RandomWork(int most) {
    std::vector<int> work;
    for (int ranks = std::uniform_int_distribution<int>(1, 20)(random_); ranks > 0; --ranks)
      work.push_back(std::uniform_int_distribution<int>(0, most)(random_));
    return work;
  }
  double RandomParameter() { return std::uniform_real_distribution<double>(0.01, 1)(random_); }
  std::mt19937 random_{1};
};

// --- WP-SGD (D1)

TEST(ContractionWeightsTest, FollowTheFormula) {
  EXPECT_THAT(ContractionWeights({10, 9, 8}, 0.5), ElementsAre(DoubleEq(4 / 7.), DoubleEq(2 / 7.), DoubleEq(1 / 7.)));
}

TEST(ContractionWeightsTest, OfNobodyAndOfOne) {
  EXPECT_THAT(ContractionWeights({}, 0.5), IsEmpty());
  EXPECT_THAT(ContractionWeights({7}, 0.5), ElementsAre(1));
}

TEST(ContractionWeightsTest, WithoutContractionAreEqual) {
  EXPECT_THAT(ContractionWeights({0, 5, 1000, 3}, 1), Each(0.25));
}

TEST_F(RandomWorkTest, ContractionWeightsSumToOneAndGrowWithTheWork) {
  for (int i = 0; i < 1000; ++i) {
    const auto work = RandomWork(100);
    const auto weights = ContractionWeights(work, RandomParameter());
    EXPECT_NEAR(Sum(weights), 1, 1e-12);
    for (std::size_t a = 0; a < work.size(); ++a)
      for (std::size_t b = 0; b < work.size(); ++b)
        EXPECT_TRUE(work[a] < work[b] ? weights[a] <= weights[b] : work[a] > work[b] || weights[a] == weights[b]);
  }
}

TEST_F(RandomWorkTest, ContractionWeightsDependOnDifferencesOnly) {
  for (int i = 0; i < 1000; ++i) {
    auto work = RandomWork(100);
    const double contraction = RandomParameter();
    const auto weights = ContractionWeights(work, contraction);
    for (int& steps : work) steps += 12345;
    EXPECT_EQ(ContractionWeights(work, contraction), weights);
  }
}

TEST(ContractionWeightsTest, AreNumbersWhateverIsMissed) {
  constexpr int kMost = std::numeric_limits<int>::max();
  EXPECT_THAT(ContractionWeights({kMost, 0}, 0.5), ElementsAre(1, 0));
  EXPECT_THAT(ContractionWeights({0, kMost, kMost}, 1e-300), ElementsAre(0, 0.5, 0.5));
  EXPECT_THAT(ContractionWeights({kMost, 0}, 1), Each(0.5));
  const auto weights = ContractionWeights({1000000, 0}, 0.99999);
  EXPECT_NEAR(weights[1], 4.54e-5, 1e-6) << "exp(-10)";
}

// --- P-Reduce

TEST(StalenessWeightsTest, GiveTheDemonstrationsExample) {
  const auto weights = StalenessWeights({2, 2, 0}, 0.9);  // lags 0, 0 and 2
  EXPECT_THAT(weights, ElementsAre(DoubleNear(0.351, 5e-4), DoubleNear(0.351, 5e-4), DoubleNear(0.299, 5e-4)));
}

TEST(StalenessWeightsTest, FollowTheFormulaWhereEveryIndexIsHeld) {
  const double alpha = 0.8, all = (1 - alpha) / (1 - std::pow(alpha, 3));
  EXPECT_THAT(StalenessWeights({7, 8, 9}, alpha), ElementsAre(DoubleNear(alpha * alpha * all, 1e-12),
                                                              DoubleNear(alpha * all, 1e-12), DoubleNear(all, 1e-12)));
}

TEST(StalenessWeightsTest, OfNobodyAndOfOne) {
  EXPECT_THAT(StalenessWeights({}, 0.9), IsEmpty());
  EXPECT_THAT(StalenessWeights({5}, 0.9), ElementsAre(1));
}

TEST(StalenessWeightsTest, OfEqualIterationsAreEqual) {  // E4, exactly
  for (int ranks = 1; ranks <= 20; ++ranks)
    for (const double alpha : {0.1, 0.9, 1.0})
      EXPECT_THAT(StalenessWeights(std::vector<int>(static_cast<std::size_t>(ranks), 42), alpha), Each(1.0 / ranks));
}

TEST(StalenessWeightsTest, ModelsOfEqualIterationShareTheirIndex) {
  const auto alone = StalenessWeights({1, 2}, 0.9);
  const auto shared = StalenessWeights({1, 1, 2, 2, 2}, 0.9);
  EXPECT_THAT(shared, ElementsAre(DoubleEq(alone[0] / 2), DoubleEq(alone[0] / 2), DoubleEq(alone[1] / 3),
                                  DoubleEq(alone[1] / 3), DoubleEq(alone[1] / 3)));
}

TEST(StalenessWeightsTest, WithAlphaOneEveryIndexCountsAlike) {
  EXPECT_THAT(StalenessWeights({1, 2, 3}, 1), ElementsAre(DoubleEq(1 / 3.), DoubleEq(1 / 3.), DoubleEq(1 / 3.)));
  EXPECT_THAT(StalenessWeights({1, 4}, 1), ElementsAre(DoubleEq(1 / 4.), DoubleEq(3 / 4.)))
      << "what nobody holds goes to the newest";
}

TEST(StalenessWeightsTest, AreContinuousTowardsAlphaOne) {
  const auto at_one = StalenessWeights({1, 2, 4}, 1);
  const auto near_one = StalenessWeights({1, 2, 4}, 1 - 1e-12);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(near_one[i], at_one[i], 1e-9);
}

TEST(StalenessWeightsTest, AreNumbersWhateverTheLag) {
  constexpr int kMost = std::numeric_limits<int>::max();
  EXPECT_THAT(StalenessWeights({kMost, 0}, 0.9), ElementsAre(1, 0));
  EXPECT_THAT(StalenessWeights({1000000, 0}, 1), ElementsAre(DoubleNear(1, 1e-5), DoubleNear(1e-6, 1e-9)));
}

TEST_F(RandomWorkTest, StalenessWeightsSumToOneAndDependOnLagsOnly) {
  for (int i = 0; i < 1000; ++i) {
    auto iterations = RandomWork(i % 2 == 0 ? 5 : 1000);
    const double alpha = RandomParameter();
    const auto weights = StalenessWeights(iterations, alpha);
    EXPECT_NEAR(Sum(weights), 1, 1e-12);
    for (const double weight : weights) EXPECT_GE(weight, 0);
    for (int& iteration : iterations) iteration += 777;
    EXPECT_EQ(StalenessWeights(iterations, alpha), weights);
  }
}

// --- Periods of WP-SGD

TEST(PeriodsTest, TheFirstStepSignalsBeforeThePeriodBegins) {
  Periods periods(3);
  periods.TakeStep();
  EXPECT_TRUE(periods.MustSignal(0));
  EXPECT_FALSE(periods.MustSignal(1));
  EXPECT_FALSE(periods.IsOver(1));
}

TEST(PeriodsTest, TheFastestRankSignalsUntilItsPeriodIsOver) {
  Periods periods(2);
  periods.TakeStep();
  EXPECT_FALSE(periods.MustSignal(1));
  periods.TakeStep();
  EXPECT_TRUE(periods.MustSignal(1));
  EXPECT_FALSE(periods.IsOver(1));
  EXPECT_FALSE(periods.MustSignal(2));
  EXPECT_TRUE(periods.IsOver(2));
  EXPECT_EQ(periods.BeginNext(), 2);
  periods.TakeStep();
  EXPECT_FALSE(periods.MustSignal(2));
  EXPECT_FALSE(periods.IsOver(2));
}

TEST(PeriodsTest, ASlowRankStopsWhenAnotherHasSignalled) {
  Periods periods(100);
  periods.TakeStep();
  EXPECT_FALSE(periods.MustSignal(2));
  EXPECT_TRUE(periods.IsOver(2));
  EXPECT_EQ(periods.BeginNext(), 1);
  EXPECT_FALSE(periods.IsOver(2));
}

TEST(PeriodsTest, WorkIsComparableWhereAPeriodIsOverForSomeOnly) {
  Periods fast(4), slow(4);
  for (int step = 0; step < 4; ++step) fast.TakeStep();
  slow.TakeStep();
  EXPECT_EQ(fast.BeginNext(), 4);
  fast.TakeStep();
  EXPECT_EQ(fast.Work() - slow.Work(), 5 - 1);
}

TEST(PeriodsTest, BeginsAnewWhereverTheSignalIs) {
  Periods fast(4), slow(4);
  for (int step = 0; step < 4; ++step) fast.TakeStep();
  fast.BeginNext();
  slow.TakeStep();
  for (Periods* periods : {&fast, &slow}) {
    periods->BeginAnew(3);
    EXPECT_FALSE(periods->IsOver(3));
    EXPECT_TRUE(periods->IsOver(4));
    EXPECT_EQ(periods->Work(), 8);
  }
}

TEST(PeriodsTest, BeginsAnewBeforeTheFirstStep) {
  Periods periods(4);
  periods.BeginAnew(0);
  EXPECT_EQ(periods.Work(), 0);
  EXPECT_TRUE(periods.MustSignal(0));
  EXPECT_FALSE(periods.IsOver(1));
}

}  // namespace
}  // namespace horovod_partial
