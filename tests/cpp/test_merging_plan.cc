#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/merging/merging_plan.h"

namespace horovod_partial {
namespace {

using testing::DoubleEq;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr MergingRule kRules[] = {MergingRule::kExact, MergingRule::kPaper, MergingRule::kWaitFree,
                                  MergingRule::kSingle, MergingRule::kThreshold};
constexpr double kThreshold = 20;

double End(const MergingPlan& plan, const std::vector<Gradient>& gradients, const LinearCost& cost) {
  return Messages(plan, gradients, cost).back().end;
}

double End(MergingRule rule, const std::vector<Gradient>& gradients, const LinearCost& cost) {
  return End(PlanMerging(rule, gradients, cost, kThreshold), gradients, cost);
}

struct Best {
  double end;
  std::size_t messages;  // the fewest that end then
};

// Over all plans: between any two gradients a message ends, or none does.
Best BruteForce(const std::vector<Gradient>& gradients, const LinearCost& cost) {
  const std::size_t gaps = gradients.size() - 1;
  Best best{End(MergingRule::kSingle, gradients, cost), 1};
  for (unsigned cuts = 0; cuts < 1u << gaps; ++cuts) {
    MergingPlan plan{1};
    for (std::size_t gap = 0; gap < gaps; ++gap) {
      if ((cuts >> gap & 1u) != 0)
        plan.push_back(1);
      else
        ++plan.back();
    }
    const double end = End(plan, gradients, cost);
    const bool same = std::abs(end - best.end) < 1e-13;
    if (same ? plan.size() < best.messages : end < best.end) best = {end, plan.size()};
  }
  return best;
}

// B1: layer 3 takes 1 and has 2, layer 2 takes 2 and has 1, layer 1 takes 3 and has 1.
const std::vector<Gradient> kCounterexample{{1, 2}, {3, 1}, {6, 1}};
constexpr LinearCost kCounterexampleCost{3, 1};

TEST(MergingPlanTest, ThePapersRuleIsNotOptimal) {
  EXPECT_THAT(PlanMerging(MergingRule::kPaper, kCounterexample, kCounterexampleCost, 0), ElementsAre(2, 1));
  EXPECT_THAT(End(MergingRule::kPaper, kCounterexample, kCounterexampleCost), DoubleEq(13));
  EXPECT_THAT(PlanMerging(MergingRule::kExact, kCounterexample, kCounterexampleCost, 0), ElementsAre(1, 2));
  EXPECT_THAT(End(MergingRule::kExact, kCounterexample, kCounterexampleCost), DoubleEq(11));
}

// MG-WFBP (IEEE TPDS 2021), Algorithm 1: layers that are a little shorter than a latency are all merged.
TEST(MergingPlanTest, EqualLayersChainUnderThePapersRule) {
  std::vector<Gradient> gradients;
  for (int i = 1; i <= 50; ++i) gradients.push_back({0.9 * i, 0.6});
  const LinearCost cost{1, 1};
  EXPECT_NEAR(End(MergingRule::kPaper, gradients, cost), 76.0, 1e-9);
  EXPECT_NEAR(End(MergingRule::kSingle, gradients, cost), 76.0, 1e-9);
  EXPECT_NEAR(End(MergingRule::kExact, gradients, cost), 48.4, 1e-9);
}

TEST(MergingPlanTest, RandomCases) {
  std::mt19937 random(1);
  const auto uniform = [&](double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(random);
  };
  int better = 0;
  for (int i = 0; i < 10'000; ++i) {
    std::vector<Gradient> gradients;
    double ready = 0;
    for (int left = std::uniform_int_distribution<int>(1, 12)(random); left > 0; --left) {
      ready += uniform(0, 4);
      gradients.push_back({ready, uniform(0, 5)});
    }
    const LinearCost cost{uniform(0, 5), uniform(0, 2)};
    const double exact = End(MergingRule::kExact, gradients, cost);
    const double paper = End(MergingRule::kPaper, gradients, cost);
    const Best brute_force = BruteForce(gradients, cost);
    ASSERT_NEAR(exact, brute_force.end, 1e-12) << "case " << i;
    ASSERT_EQ(PlanMerging(MergingRule::kExact, gradients, cost, 0).size(), brute_force.messages) << "case " << i;
    ASSERT_LE(exact, paper + 1e-12) << "case " << i;
    const double best =
        std::min(End(MergingRule::kWaitFree, gradients, cost), End(MergingRule::kSingle, gradients, cost));
    ASSERT_LE(paper, best + 1e-12) << "case " << i;
    ASSERT_LE(exact, End(MergingRule::kThreshold, gradients, cost) + 1e-12) << "case " << i;
    better += exact < paper - 1e-9 ? 1 : 0;
  }
  EXPECT_GT(better, 100);  // else the cases say nothing
}

// Which gradients the first messages have does not matter as long as the line is free for the last.
TEST(MergingPlanTest, MessagesThatGainNothingAreLeftOut) {
  std::vector<Gradient> gradients;
  for (int i = 1; i <= 200; ++i) gradients.push_back({0.5 * i, 0.001});
  const LinearCost cost{1, 1};
  EXPECT_THAT(PlanMerging(MergingRule::kExact, gradients, cost, 0), ElementsAre(197, 3));
}

TEST(MergingPlanTest, EveryRuleTakesEveryGradientOnceAndInOrder) {
  std::vector<Gradient> gradients;
  for (int i = 0; i < 1000; ++i) gradients.push_back({i * 0.01, 1.0 + i % 7});
  for (const MergingRule rule : kRules) {
    int count = 0;
    for (const int gradients_of_message : PlanMerging(rule, gradients, {0.5, 0.001}, kThreshold)) {
      EXPECT_GE(gradients_of_message, 1);
      count += gradients_of_message;
    }
    EXPECT_EQ(count, 1000);
  }
}

TEST(MergingPlanTest, AThresholdTakesWhatIsReadyWhenTheLineIsFree) {
  const std::vector<Gradient> gradients{{0, 4}, {1, 8}, {2, 8}, {3, 8}, {20, 1}};
  // The first goes alone; by its end, at 5, three more are ready, of which two fit into 20 bytes; they take until 22.
  EXPECT_THAT(PlanMerging(MergingRule::kThreshold, gradients, {1, 1}, 20), ElementsAre(1, 2, 2));
}

TEST(MergingPlanTest, AMessageLargerThanTheThresholdGoesAlone) {
  EXPECT_THAT(PlanMerging(MergingRule::kThreshold, {{0, 50}, {0, 50}}, {1, 1}, 20), ElementsAre(1, 1));
}

TEST(MergingPlanTest, NoGradients) {
  for (const MergingRule rule : kRules) EXPECT_THAT(PlanMerging(rule, {}, {1, 1}, kThreshold), IsEmpty());
}

TEST(MergingPlanTest, APlanThatDoesNotFitIsRefused) {
  for (const MergingPlan& plan : {MergingPlan{2}, MergingPlan{2, 2}, MergingPlan{3, 0}, MergingPlan{4, -1}})
    EXPECT_THROW(Messages(plan, kCounterexample, kCounterexampleCost), std::invalid_argument);
}

}  // namespace
}  // namespace horovod_partial
