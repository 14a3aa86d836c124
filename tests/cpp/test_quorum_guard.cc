// Everything that a constant load, and then another one, can do to the guard of an adaptive quorum: 3 candidates, all
// combinations of what they really make, and of how wrong predictions are.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/quorum/quorum_guard.h"

namespace horovod_partial {
namespace {

using Rates = std::array<double, 3>;

// What the candidates make, and what replays say of it. Those of a smaller quorum say too little of larger ones, where
// ranks share cores; those of a larger one promise too much, or too little.
struct Load {
  Rates rates;
  double hidden = 1;  // of the true rate, for candidates above the present one
  double hoped = 1;   // for those below

  std::vector<double> PredictedAt(std::size_t at) const {
    std::vector<double> predicted;
    for (std::size_t i = 0; i < rates.size(); ++i)
      predicted.push_back(rates[i] * (i < at ? hidden : i > at ? hoped : 1));
    return predicted;
  }
};

constexpr std::array kRates = {0.2, 0.5, 0.8, 0.97, 1.0, 1.03, 1.3, 3.0};  // beside that of all ranks
constexpr std::array kHidden = {0.61, 0.8, 1.0};
constexpr std::array kHoped = {0.8, 1.0, 1.2, 2.0};

std::vector<Load> AllLoads() {
  std::vector<Load> loads;
  for (const double middle : kRates)
    for (const double small : kRates)
      for (const double hidden : kHidden)
        for (const double hoped : kHoped) loads.push_back({{1, middle, small}, hidden, hoped});
  return loads;
}

std::string NameOf(const Load& load) {
  std::string text = "rates";
  for (const double rate : load.rates) text += " " + std::to_string(rate);
  return text + ", hidden " + std::to_string(load.hidden) + ", hoped " + std::to_string(load.hoped);
}

// A guard under a load, and what became of it.
struct Course {
  explicit Course(QuorumGuard of) : guard(of) {}
  Course() : Course(QuorumGuard(3)) {}

  void Run(const Load& load, int periods) {
    changes = 0;
    rests.clear();
    seconds = least_seconds = 0;
    for (int i = 0; i < periods; ++i) {
      const double rate = load.rates[guard.at()];
      changes += guard.Evaluate(load.PredictedAt(guard.at()), QuorumGuard::Rate{rate, 0}) ? 1 : 0;
      if (!guard.on_trial()) rests.insert(guard.at());
      seconds += 1 / load.rates[guard.at()];
      if (!guard.on_trial()) resting = guard.at();
      least_seconds += 1 / load.rates[resting];
    }
  }

  QuorumGuard guard;
  int changes = 0;
  std::set<std::size_t> rests;  // where it was while nothing was on trial
  std::size_t resting = 0;
  double seconds = 0;
  double least_seconds = 0;  // without trials
};

constexpr int kSettled = 400;  // periods
constexpr int kObserved = 1200;

TEST(QuorumGuardTest, AConstantLoadSeesNoEndlessChanges) {
  for (const Load& load : AllLoads()) {
    Course course;
    course.Run(load, kSettled);
    course.Run(load, kObserved);
    EXPECT_EQ(course.rests.size(), 1u) << NameOf(load);
    EXPECT_LE(course.changes, 2 * kObserved / 24) << NameOf(load);  // up and back once in the longest hold
  }
}

TEST(QuorumGuardTest, WhatTrialsCostIsBounded) {
  for (const Load& load : AllLoads()) {
    Course course;
    course.Run(load, kSettled);
    course.Run(load, kObserved);
    const double hopeless = 1 / *std::min_element(load.rates.begin(), load.rates.end());
    // A hopeless trial lasts for one of 25 periods; one that is nearly as good for three.
    EXPECT_LE(course.seconds, (1.02 + hopeless / 25) * course.least_seconds) << NameOf(load);
  }
}

TEST(QuorumGuardTest, ComesToRestWhereNoCandidateIsMuchFaster) {
  for (const Load& load : AllLoads()) {
    if (load.hoped < 1) continue;  // what is never promised is never tried
    Course course;
    course.Run(load, kSettled);
    const double best = *std::max_element(load.rates.begin(), load.rates.end());
    EXPECT_GE(load.rates[course.resting], 0.85 * best) << NameOf(load);
  }
}

TEST(QuorumGuardTest, ComesBackToAllRanksWhenDelaysHaveEnded) {
  const auto loads = AllLoads();
  for (const Load& before : loads) {
    for (const int periods : {12, 40, 200, 203}) {
      Course course;
      course.Run(before, periods);
      const double faster = 1.5 * *std::max_element(before.rates.begin(), before.rates.end());
      for (const double hidden : kHidden) {
        Course after(course.guard);
        const Load ended{{faster, faster, faster}, hidden, 1.0};
        after.Run(ended, 24);
        EXPECT_EQ(after.guard.at(), 0u) << NameOf(before) << ", then hidden " << hidden << " after " << periods;
      }
    }
  }
}

TEST(QuorumGuardTest, WithoutDelaysItNeverMoves) {
  Course course;
  course.Run({{1, 1, 1}, 1, 1.06}, kObserved);  // ranks vary by a little, which replays of smaller quorums promise
  EXPECT_EQ(course.changes, 0);
}

TEST(QuorumGuardTest, TwoEvaluationsMustAgree) {
  QuorumGuard guard(3);
  const QuorumGuard::Rate rate{1, 0};
  EXPECT_FALSE(guard.Evaluate({1, 2, 2}, rate));
  EXPECT_FALSE(guard.Evaluate({1, 1, 1}, rate));
  EXPECT_FALSE(guard.Evaluate({1, 1, 2}, rate));
  EXPECT_TRUE(guard.Evaluate({1, 2, 2}, rate));
  EXPECT_EQ(guard.at(), 1u) << "the more cautious of two votes";
  EXPECT_EQ(guard.why(), QuorumGuard::Why::kFaster);
}

TEST(QuorumGuardTest, TakesTheLargestQuorumThatIsAsFast) {
  QuorumGuard guard(3);
  for (int i = 0; i < 2; ++i) guard.Evaluate({1, 1.93, 2}, QuorumGuard::Rate{1, 0});
  EXPECT_EQ(guard.at(), 1u);
}

TEST(QuorumGuardTest, WhatTheRatesDoNotDisproveStays) {
  QuorumGuard guard(2);
  for (int i = 0; i < 2; ++i) guard.Evaluate({1, 2}, QuorumGuard::Rate{1, 0.3});
  ASSERT_EQ(guard.at(), 1u);
  for (int i = 0; i < QuorumGuard::kLongestTrial; ++i) {
    EXPECT_TRUE(guard.on_trial());
    guard.Evaluate({1, 2}, QuorumGuard::Rate{0.9, 0.3});
  }
  EXPECT_FALSE(guard.on_trial());
  EXPECT_EQ(guard.at(), 1u);
}

TEST(QuorumGuardTest, WithoutAMeasureItGoesByPredictions) {
  QuorumGuard guard(2);
  for (int i = 0; i < 2 + QuorumGuard::kTrial; ++i) guard.Evaluate({1, 2}, std::nullopt);
  EXPECT_EQ(guard.at(), 1u);
  EXPECT_FALSE(guard.on_trial());
}

// A guard that has gone to the smaller of two quorums, which is twice as fast, and stays there.
QuorumGuard AtTheSmaller() {
  QuorumGuard guard(2);
  for (int i = 0; i < 2; ++i) guard.Evaluate({1, 2}, QuorumGuard::Rate{1, 0});
  for (int i = 0; i < QuorumGuard::kTrial; ++i) guard.Evaluate({1, 2}, QuorumGuard::Rate{2, 0});
  EXPECT_EQ(guard.at(), 1u);
  EXPECT_FALSE(guard.on_trial());
  return guard;
}

TEST(QuorumGuardTest, ATrialDownwardsThatNothingMeasuresIsTakenBack) {
  QuorumGuard guard(2);
  for (int i = 0; i < 2; ++i) guard.Evaluate({1, 2}, QuorumGuard::Rate{1, 0});
  ASSERT_TRUE(guard.on_trial());
  for (int i = 0; i < QuorumGuard::kLongestTrial; ++i) guard.Evaluate({1, 2}, std::nullopt);
  EXPECT_EQ(guard.at(), 0u);
  EXPECT_EQ(guard.why(), QuorumGuard::Why::kTakenBack);
}

TEST(QuorumGuardTest, ATrialUpwardsThatNothingMeasuresStays) {
  QuorumGuard guard = AtTheSmaller();
  for (int i = 0; i < 30 && guard.at() == 1; ++i) guard.Evaluate({2, 2}, QuorumGuard::Rate{2, 0});
  ASSERT_EQ(guard.why(), QuorumGuard::Why::kAsFast);
  for (int i = 0; i < QuorumGuard::kLongestTrial; ++i) guard.Evaluate({2, 2}, std::nullopt);
  EXPECT_EQ(guard.at(), 0u);
  EXPECT_FALSE(guard.on_trial());
}

TEST(QuorumGuardTest, DoesNotProbeWhatItCannotMeasure) {
  QuorumGuard guard = AtTheSmaller();
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(guard.Evaluate({1.5, 2}, std::nullopt));
  bool probed = false;
  for (int i = 0; i < 100 && !probed; ++i) probed = guard.Evaluate({1.5, 2}, QuorumGuard::Rate{2, 0});
  EXPECT_EQ(guard.why(), QuorumGuard::Why::kProbe);
}

TEST(QuorumGuardTest, AnEndedTrialStays) {
  QuorumGuard guard(2);
  for (int i = 0; i < 2; ++i) guard.Evaluate({1, 2}, QuorumGuard::Rate{1, 0});
  guard.EndTrial();
  EXPECT_EQ(guard.at(), 1u);
  EXPECT_FALSE(guard.on_trial());
  guard.Evaluate({1, 2}, QuorumGuard::Rate{0.1, 0});
  EXPECT_EQ(guard.at(), 1u);
}

TEST(QuorumGuardTest, OneCandidateIsNoChoice) {
  QuorumGuard guard(1);
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(guard.Evaluate({1}, QuorumGuard::Rate{1, 0}));
}

}  // namespace
}  // namespace horovod_partial
