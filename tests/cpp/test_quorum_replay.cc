#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "core/quorum/quorum_replay.h"
#include "core/quorum/step_window.h"
#include "simulator/job.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;

StepSample SampleOf(const std::vector<std::vector<Time>>& ranks, Time reduction = 0ms) {
  StepSample sample;
  sample.reduction = reduction;
  for (const auto& steps : ranks) {
    sample.begin.push_back(sample.steps.size());
    sample.steps.insert(sample.steps.end(), steps.begin(), steps.end());
    Time busy{0};
    for (const Time step : steps) busy += step;
    sample.span = std::max(sample.span, busy);
  }
  sample.begin.push_back(sample.steps.size());
  return sample;
}

std::vector<Time> Same(Time step, int count = 64) { return std::vector<Time>(static_cast<std::size_t>(count), step); }

double Rate(const StepSample& sample, int quorum, Round max_staleness = 8, Time grace = 0ms) {
  return PredictRate(sample, {quorum, max_staleness, grace});
}

TEST(QuorumReplayTest, EqualRanksAreAsFastWithAnyQuorum) {
  const StepSample sample = SampleOf({Same(90ms), Same(90ms), Same(90ms), Same(90ms)}, 10ms);
  for (int quorum = 1; quorum <= 4; ++quorum) EXPECT_NEAR(Rate(sample, quorum), 40, 0.5) << quorum;
}

TEST(QuorumReplayTest, AllRanksTakeTheSlowestOnesTime) {
  EXPECT_NEAR(Rate(SampleOf({Same(100ms), Same(300ms, 22)}), 2), 2 / 0.3, 0.1);
}

TEST(QuorumReplayTest, WithoutASlowRankAllTakeTheirOwn) {
  EXPECT_NEAR(Rate(SampleOf({Same(100ms), Same(300ms, 22)}), 1), 10 + 1 / 0.3, 0.2);
}

TEST(QuorumReplayTest, AStaleRankIsWaitedFor) {
  // The slow rank comes late to every fifth round, or on time, where the others may not go further.
  const StepSample sample = SampleOf({Same(100ms), Same(500ms, 13)});
  EXPECT_NEAR(Rate(sample, 1, 8), 12, 0.3);
  EXPECT_LT(Rate(sample, 1, 1), 7);
  EXPECT_NEAR(Rate(sample, 1, 0), 4, 0.1);
}

TEST(QuorumReplayTest, AGraceHoldsRoundsOpen) {
  EXPECT_NEAR(Rate(SampleOf({Same(100ms), Same(120ms, 53)}), 1, 8, 30ms), 2 / 0.12, 0.2);
  EXPECT_NEAR(Rate(SampleOf({Same(100ms), Same(300ms, 22)}), 1, 8, 50ms), 1 / 0.15 + 1 / 0.3, 0.2);
}

TEST(QuorumReplayTest, NothingIsPredictedOfNothing) {
  EXPECT_EQ(Rate(StepSample(), 1), 0);
  EXPECT_EQ(Rate(SampleOf({{0ms}, {0ms}}), 1), 0);
}

// What it is for: the replay agrees with a whole job, in which the coordinator decides.
TEST(QuorumReplayTest, PredictsWhatTheSimulatorSays) {
  constexpr int kRanks = 8;
  constexpr int kSteps = 256;
  std::mt19937 random(7);
  std::exponential_distribution<double> delay(1 / 0.05);
  JobConfig config;
  config.ranks = kRanks;
  config.iterations = kSteps;
  config.compute = 0.1;
  config.messages = {{config.compute, 8}};
  config.costs.assign(kRanks, {0.005, 0});
  for (int i = 0; i < kRanks * kSteps; ++i) config.delays.push_back(delay(random));
  StepWindow window(kRanks);
  for (int step = kSteps - 64; step < kSteps; ++step) {
    for (Rank rank = 0; rank < kRanks; ++rank) {
      const double seconds = config.compute + config.delays[static_cast<std::size_t>(step * kRanks + rank)];
      window.Begin(rank, 0ms);
      window.End(rank, step, std::chrono::duration_cast<Time>(std::chrono::duration<double>(seconds)), 1);
    }
  }
  StepSample sample = window.Sample(kSteps, 0ms);
  sample.reduction = 5ms;
  for (const int quorum : {8, 7, 6, 4, 2, 1}) {
    config.policy.quorum = quorum;
    config.policy.grace = 0ms;
    const JobResult result = Job(config).Run();
    const double end = *std::min_element(result.ends.end() - kRanks, result.ends.end());
    const auto steps = std::count_if(result.ends.begin(), result.ends.end(), [&](double at) { return at <= end; });
    EXPECT_NEAR(Rate(sample, quorum) / (static_cast<double>(steps) / end), 1, 0.08) << quorum;
  }
}

// --- What it replays

TEST(StepWindowTest, AStepGoesFromTheResultToTheArrival) {
  StepWindow window(2);
  window.Begin(0, 10ms);
  window.End(0, 1, 25ms, 1);
  window.Begin(1, 10ms);
  window.End(1, 1, 50ms, 2);  // two steps since it was last heard of
  const StepSample sample = window.Sample(2, 60ms);
  EXPECT_EQ(sample.steps, (std::vector<Time>{15ms, 20ms, 20ms}));
  EXPECT_EQ(sample.begin, (std::vector<std::size_t>{0, 1, 3}));
  EXPECT_EQ(sample.span, 40ms);
}

TEST(StepWindowTest, WhatALongStepHasLastedCounts) {
  StepWindow window(1);
  for (Round round = 1; round < 4; ++round) {
    window.Begin(0, 0ms);
    window.End(0, round, 10ms, 1);
  }
  window.Begin(0, 100ms);
  EXPECT_EQ(window.Sample(4, 105ms).steps.size(), 3u) << "it may yet be as short as the others";
  EXPECT_EQ(window.Sample(4, 190ms).steps.back(), 10ms) << "one long step is a pause";
}

TEST(StepWindowTest, OldRoundsDoNotCount) {
  StepWindow window(1);
  window.Begin(0, 0ms);
  window.End(0, 1, 10ms, 1);
  EXPECT_EQ(window.Sample(1 + StepWindow::kRounds, 0ms).ranks(), 1u);
  EXPECT_EQ(window.Sample(2 + StepWindow::kRounds, 0ms).ranks(), 0u);
}

TEST(StepWindowTest, AFewPausesAreLeftOut) {
  StepWindow window(2);
  for (Round round = 0; round < 32; ++round) {
    for (Rank rank = 0; rank < 2; ++rank) {
      window.Begin(rank, 0ms);
      window.End(rank, round, round % 16 == 3 + rank ? 500ms : 10ms, 1);
    }
  }
  const auto steps = window.Sample(32, 0ms).steps;
  EXPECT_EQ(std::count(steps.begin(), steps.end(), Time(500ms)), 2) << "of four";
}

TEST(StepWindowTest, WhoIsOutOfTrainingIsNoSlowRank) {
  StepWindow window(2);
  for (Rank rank = 0; rank < 2; ++rank) {
    window.Begin(rank, 0ms);
    window.End(rank, 1, 10ms, 1);
    window.Begin(rank, 10ms);
  }
  window.Leave(1);
  EXPECT_EQ(window.Sample(2, 10s).ranks(), 1u);
  window.Return(1);
  window.End(1, 2, 10s, 1);
  EXPECT_EQ(window.Sample(2, 10ms).span, 10ms) << "the time away is no step";
}

}  // namespace
}  // namespace horovod_partial
