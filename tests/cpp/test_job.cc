#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <utility>
#include <vector>

#include "harness/policies.h"
#include "simulator/job.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
using test::Pairs;
using test::Quorum;
using test::Ready;
using testing::DoubleNear;
using testing::Each;
using testing::ElementsAre;

constexpr double kNanosecond = 1e-9;

// A step takes a second, and makes one message. `delays` has a row for each iteration.
JobConfig Steps(const Policy& policy, const std::vector<std::vector<double>>& delays, double latency = 0) {
  JobConfig config;
  config.ranks = static_cast<int>(delays[0].size());
  config.iterations = static_cast<int>(delays.size());
  config.policy = policy;
  config.messages = {{1, 8}};
  config.compute = 1;
  for (const auto& row : delays) config.delays.insert(config.delays.end(), row.begin(), row.end());
  config.costs.assign(delays[0].size(), {latency, 0});
  return config;
}

JobConfig Models(const Policy& policy, Late late, const std::vector<std::vector<double>>& delays, double latency = 0) {
  JobConfig config = Steps(policy, delays, latency);
  config.late = late;
  return config;
}

// When the steps of a rank ended.
std::vector<double> EndsOf(const JobResult& result, int ranks, Rank rank) {
  std::vector<double> ends;
  for (std::size_t i = static_cast<std::size_t>(rank); i < result.ends.size(); i += static_cast<std::size_t>(ranks))
    ends.push_back(result.ends[i]);
  return ends;
}

template <class... Values>
auto Seconds(Values... values) {
  return ElementsAre(DoubleNear(values, kNanosecond)...);
}

TEST(JobTest, FullTakesTheSlowestRank) {
  const JobResult result = Job(Steps(Quorum(3), {{0, 2, 0}, {1, 0, 0}}, 0.5)).Run();
  EXPECT_THAT(result.ends, Seconds(3.5, 3.5, 3.5, 6.0, 6.0, 6.0));
  EXPECT_EQ(result.late, 0);
  EXPECT_THAT(result.messages[0].fresh, ElementsAre(1, 0, 0, 2));  // the end's round has none
}

TEST(JobTest, UnderSoloALateRankTakesItsResultAtOnce) {
  const JobResult result = Job(Steps(Quorum(1), {{0, 0}, {0, 1}, {0, 0}}, 0.25)).Run();
  EXPECT_THAT(EndsOf(result, 2, 0), Seconds(1.25, 2.5, 3.75));
  // It comes at 3.25, when round 1 is over, and at 4.25, when round 2 is.
  EXPECT_THAT(EndsOf(result, 2, 1), Seconds(1.25, 3.25, 4.25));
  EXPECT_EQ(result.arrivals, 6);
  EXPECT_EQ(result.late, 2);
  EXPECT_THAT(result.received, Each(6.0));
}

TEST(JobTest, WhoArrivesWhileTheRoundRunsWaitsForItsEnd) {
  const JobResult result = Job(Steps(Quorum(1), {{0, 0}, {0, 0.5}}, 1)).Run();
  EXPECT_THAT(result.ends, Seconds(2.0, 2.0, 4.0, 4.0));
  EXPECT_EQ(result.late, 1);
}

TEST(JobTest, AQuorumWaitsForItsLastRank) {
  const JobResult result = Job(Steps(Quorum(2), {{0, 0, 0}, {0, 0.5, 5}})).Run();
  EXPECT_THAT(EndsOf(result, 3, 0), Seconds(1.0, 2.5));
  EXPECT_THAT(EndsOf(result, 3, 2), Seconds(1.0, 7.0));
}

TEST(JobTest, RanksThatHaveEndedDoNotHoldTheOthers) {
  const JobResult result = Job(Steps(Quorum(2), {{0, 0, 0}, {0, 0, 1}, {0, 0, 1}, {0, 0, 1}})).Run();
  EXPECT_THAT(EndsOf(result, 3, 2), Seconds(1.0, 3.0, 5.0, 7.0));
  EXPECT_THAT(result.received, Each(12.0));
}

TEST(JobTest, AGracePeriodHoldsASatisfiedRoundOpen) {
  Policy policy = Quorum(1);
  policy.grace = 500ms;
  const JobResult result = Job(Steps(policy, {{0, 0, 0}, {0, 0.25, 2}})).Run();
  EXPECT_THAT(EndsOf(result, 3, 0), Seconds(1.0, 2.5));
  EXPECT_THAT(EndsOf(result, 3, 1), Seconds(1.0, 2.5));
  EXPECT_THAT(EndsOf(result, 3, 2), Seconds(1.0, 4.0));
}

TEST(JobTest, MessagesGoOneAfterTheOther) {
  JobConfig config = Steps(Quorum(2), {{0, 0}}, 1.5);
  config.messages = {{1, 8}, {2, 8}};
  config.compute = 2;
  EXPECT_THAT(Job(config).Run().ends, Each(DoubleNear(4.0, kNanosecond)));
}

TEST(JobTest, MessagesTakeWhatTheirBytesCost) {
  JobConfig config = Steps(Quorum(2), {{0, 0}});
  config.messages = {{0.25, 2}, {0.5, 10}, {1, 1}};
  config.costs.assign(2, {0.125, 0.0625});
  std::vector<Gradient> gradients;
  for (const auto& message : config.messages) gradients.push_back({message.ready, message.bytes});
  const auto expected = Messages({1, 1, 1}, gradients, config.costs[1]);
  EXPECT_THAT(Job(config).Run().ends, Each(DoubleNear(expected.back().end, kNanosecond)));
}

TEST(JobTest, NegotiationsKeepTheRhythmOfTheCycle) {
  JobConfig config = Steps(Quorum(1), {{0}, {0}}, 0.25);
  config.messages = {{1.5, 8}};
  config.compute = 1.5;
  config.cycle = 1;
  EXPECT_THAT(Job(config).Run().ends, Seconds(2.25, 4.25));
  config.costs = {{1.75, 0}};  // longer than a cycle: the next begins behind it
  EXPECT_THAT(Job(config).Run().ends, Seconds(3.75, 7.5));
}

TEST(JobTest, GroupsReduceAtTheSameTimeAndWaitForNobody) {
  JobConfig config = Models(Pairs(0), Late::kKeep, {{0, 0, 0, 0}, {0, 0, 0, 9}, {0, 0, 0, 0}});
  config.costs = {{0, 0}, {0.25, 0}, {0.5, 0}, {1, 0}};
  const JobResult result = Job(config).Run();
  EXPECT_THAT(EndsOf(result, 4, 0), Seconds(2.0, 3.25, 4.5));  // the first round is of all ranks
  EXPECT_THAT(EndsOf(result, 4, 2), Seconds(2.0, 3.25, 4.5));
  EXPECT_THAT(EndsOf(result, 4, 3), Seconds(2.0, 12.0, 13.25));
}

TEST(JobTest, EveryPeriodicRoundOfGroupsIsOfAllRanks) {
  const JobResult result =
      Job(Models(Pairs(3), Late::kKeep, {{0, 0, 0, 0}, {0, 0, 0, 2}, {0, 0, 0, 0}, {0, 0, 0, 0}})).Run();
  EXPECT_THAT(EndsOf(result, 4, 0), Seconds(1.0, 2.0, 5.0, 6.0));
  EXPECT_THAT(EndsOf(result, 4, 3), Seconds(1.0, 4.0, 5.0, 6.0));
}

TEST(JobTest, AnAverageRunsBesideTheNextStep) {
  JobConfig config = Models(Pairs(0), Late::kKeep, {{0, 0}, {0, 0}, {0, 0}}, 0.25);
  config.overlap = true;
  EXPECT_THAT(EndsOf(Job(config).Run(), 2, 0), Seconds(1.0, 2.0, 3.25));  // the last step waits for its own average
  config = Models(Pairs(3), Late::kKeep, {{0, 0, 0, 0}, {0, 0, 0, 2}, {0, 0, 0, 0}, {0, 0, 0, 0}});
  config.overlap = true;
  const JobResult result = Job(config).Run();
  // The third round is of all ranks. Rank 0 waits for it, and so for rank 3, at the end of its fourth step only.
  EXPECT_THAT(EndsOf(result, 4, 0), Seconds(1.0, 2.0, 3.0, 5.0));
  EXPECT_THAT(EndsOf(result, 4, 3), Seconds(1.0, 4.0, 5.0, 6.0));
}

TEST(JobTest, AnAverageByWorkRunsBesideTheNextStep) {
  JobConfig config = Models(Quorum(2), Late::kDiscard, {{0, 1}, {2, 0}, {0, 0}});
  config.period = 1;
  config.overlap = true;
  // Both meet after the first step. Rank 1 waits at the end of its third step for the average of the second steps.
  const JobResult result = Job(config).Run();
  EXPECT_THAT(EndsOf(result, 2, 0), Seconds(2.0, 5.0, 6.0));
  EXPECT_THAT(EndsOf(result, 2, 1), Seconds(2.0, 3.0, 6.0));
}

TEST(JobTest, ReadyRanksReduceWithEachOther) {
  const JobResult result = Job(Models(Ready(2), Late::kDiscard, {{0, 0, 0, 0}, {0, 0.5, 1, 3}}, 0.25)).Run();
  EXPECT_THAT(EndsOf(result, 4, 0), Seconds(1.25, 3.0));
  EXPECT_THAT(EndsOf(result, 4, 1), Seconds(1.25, 3.0));
  EXPECT_THAT(EndsOf(result, 4, 2), Seconds(1.25, 5.5));
  EXPECT_THAT(EndsOf(result, 4, 3), Seconds(1.25, 5.5));
}

TEST(JobTest, AnAverageByWorkWaitsForTheStepsUnderWay) {
  JobConfig config = Models(Quorum(2), Late::kDiscard, {{0, 1}, {0, 1}, {0, 1}, {0, 1}});
  config.period = 4;
  const JobResult result = Job(config).Run();
  // Both meet after the first step. At 5 the fast one has taken 4 steps, and the slow one is in its third.
  EXPECT_THAT(EndsOf(result, 2, 0), Seconds(2.0, 3.0, 4.0, 6.0));
  EXPECT_THAT(EndsOf(result, 2, 1), Seconds(2.0, 4.0, 6.0, 8.0));
  EXPECT_EQ(result.arrivals, 2);
}

TEST(JobTest, AnAverageInEveryStepIsFull) {
  JobConfig config = Models(Quorum(2), Late::kDiscard, {{0, 1}, {2, 0}});
  config.period = 1;
  EXPECT_THAT(Job(config).Run().ends, Seconds(2.0, 2.0, 5.0, 5.0));
}

// Whatever the delays: on each rank all results together are all gradients together.
TEST(JobTest, EveryGradientIsDeliveredOnce) {
  constexpr int kRanks = 5;
  constexpr int kIterations = 40;
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<double> uniform;
    std::vector<std::vector<double>> delays(kIterations, std::vector<double>(kRanks));
    for (auto& row : delays)
      for (double& delay : row) delay = uniform(generator) < 0.5 ? 0 : 2 * uniform(generator);
    Policy policy = Quorum(1 + static_cast<int>(seed) % kRanks);
    policy.max_staleness = 1 + static_cast<Round>(seed) % 4;
    if (seed % 3 == 0) policy.rule = Policy::Rule::kInitiator;
    if (seed % 2 == 0) policy.grace = Policy::kAutomaticGrace;
    JobConfig config = Steps(policy, delays, 0.1 * uniform(generator));
    config.messages = {{0.25, 8}, {0.5, 8}, {0.5, 8}, {1, 8}};
    config.cycle = seed % 5 == 0 ? 0.01 : 0;
    const JobResult result = Job(config).Run();
    EXPECT_THAT(result.received, Each(kRanks * kIterations * 4.0)) << "seed " << seed;
    EXPECT_EQ(result.arrivals, kRanks * kIterations * 4) << "seed " << seed;
    for (const auto& statistics : result.messages)
      for (const auto& [rounds, contributions] : statistics.staleness) EXPECT_LE(rounds, 5) << "seed " << seed;
  }
}

TEST(JobTest, IsTheSameEachTime) {
  const JobConfig config = Steps(Quorum(1), {{0, 0.3, 0.7}, {0.2, 0, 0.1}, {0, 0.9, 0}}, 0.1);
  EXPECT_EQ(Job(config).Run().ends, Job(config).Run().ends);
}

}  // namespace
}  // namespace horovod_partial
