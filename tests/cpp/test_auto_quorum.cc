// The adaptive quorum in whole jobs, in simulated time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/quorum/auto_quorum.h"
#include "core/rounds/coordinator.h"
#include "harness/puppets.h"
#include "simulator/job.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

Policy Auto(int least = 1) {
  Policy policy;
  policy.rule = Policy::Rule::kAuto;
  policy.quorum = least;
  policy.description = "Auto(" + std::to_string(least) + ")";
  return policy;
}

constexpr int kRanks = 8;

// Steps of 50 ms with that many messages, the last one at their end. `delay` says what rank `r` is late by in step `t`,
// in steps.
template <class Delay>
JobConfig Steps(int iterations, Delay delay, int messages = 1) {
  JobConfig config;
  config.ranks = kRanks;
  config.iterations = iterations;
  config.policy = Auto();
  config.compute = 0.05;
  for (int i = messages; i > 0; --i) config.messages.push_back({config.compute / i, 8});
  config.cycle = 0.001;
  config.costs.assign(kRanks, {0.001, 0});
  for (int t = 0; t < iterations; ++t)
    for (Rank r = 0; r < kRanks; ++r) config.delays.push_back(config.compute * delay(t, r));
  return config;
}

const auto& QuorumsOf(const JobResult& result) { return result.messages.back().quorums; }

std::vector<int> NumbersOf(const JobResult& result) {
  std::vector<int> quorums;
  for (const auto& change : QuorumsOf(result)) quorums.push_back(change.quorum);
  return quorums;
}

TEST(AutoQuorumTest, WithoutDelaysNobodyIsEverLate) {
  const JobResult result = Job(Steps(400, [](int, Rank) { return 0.0; })).Run();
  EXPECT_EQ(result.late, 0);
  EXPECT_THAT(NumbersOf(result), ElementsAre(kRanks));
}

TEST(AutoQuorumTest, RanksThatVaryByALittleAreNoReason) {
  std::mt19937 random(3);
  std::normal_distribution<double> vary(0.1, 0.02);
  const JobResult result = Job(Steps(400, [&](int, Rank) { return std::max(0.0, vary(random)); })).Run();
  EXPECT_EQ(result.late, 0);
}

TEST(AutoQuorumTest, RarePausesAreNoReason) {
  const JobResult result = Job(Steps(400, [](int t, Rank r) { return t % 40 == 20 && r == t % 8 ? 4.0 : 0.0; })).Run();
  EXPECT_EQ(result.late, 0);
}

TEST(AutoQuorumTest, AnEvaluationOfAllRanksIsNoReason) {
  const JobResult result = Job(Steps(400, [](int t, Rank) { return t % 100 == 99 ? 50.0 : 0.0; })).Run();
  EXPECT_EQ(result.late, 0);
}

TEST(AutoQuorumTest, GoesDownWhenARankIsDelayedAndUpAgainAfterwards) {
  const JobResult result = Job(Steps(1200, [](int t, Rank r) { return r == 0 && t >= 300 && t < 600 ? 2 : 0; })).Run();
  const auto& quorums = QuorumsOf(result);
  ASSERT_THAT(NumbersOf(result), ElementsAre(kRanks, 7, kRanks));
  EXPECT_GE(quorums[1].round, 300);
  EXPECT_LE(quorums[1].round, 300 + 128);
  EXPECT_EQ(quorums[1].why, QuorumGuard::Why::kFaster);
  const double ended = result.ends[599 * kRanks];
  const auto round = std::lower_bound(result.closed.begin(), result.closed.end(), ended) - result.closed.begin();
  EXPECT_GT(quorums[2].round, round);
  EXPECT_LE(quorums[2].round, round + 256);
}

TEST(AutoQuorumTest, IsAsFastAsItsBestQuorumUnderRandomDelays) {
  const auto delay = [](int t, Rank r) { return r == t * 5 % kRanks ? 2.0 : 0.0; };
  const auto seconds = [&](const Policy& policy) {
    JobConfig config = Steps(600, delay);
    config.policy = policy;
    return Job(config).Run().ends.back();
  };
  Policy all;
  all.quorum = kRanks;
  Policy solo;
  solo.quorum = 1;
  EXPECT_LT(seconds(Auto()), 1.15 * seconds(solo));
  EXPECT_LT(seconds(Auto()), 0.6 * seconds(all));
}

TEST(AutoQuorumTest, TheSameHoldsInEachMessageOfAStep) {
  const JobResult result = Job(Steps(600, [](int, Rank r) { return r == 0 ? 2 : 0; }, 3)).Run();
  for (const auto& message : result.messages) {
    ASSERT_GE(message.quorums.size(), 2u);
    EXPECT_EQ(message.quorums[1].quorum, 7);
    EXPECT_LE(message.quorums[1].round - QuorumsOf(result)[1].round, 1);
  }
}

TEST(AutoQuorumTest, GoesNoFurtherThanItMay) {
  JobConfig config = Steps(300, [](int, Rank r) { return r < 4 ? 3 : 0; });
  config.policy = Auto(5);
  const JobResult result = Job(config).Run();
  EXPECT_THAT(NumbersOf(result), testing::Each(testing::Ge(5)));
}

TEST(AutoQuorumTest, ChangesAreFew) {
  std::mt19937 random(11);
  std::exponential_distribution<double> delay(2);
  const JobResult result = Job(Steps(1000, [&](int, Rank) { return delay(random); })).Run();
  EXPECT_LE(QuorumsOf(result).size(), result.closed.size() / 40);
}

// --- Told by hand

TEST(AutoQuorumTest, ASlowRankThatIsOutOfTrainingIsNoReason) {
  AutoQuorum quorum(2, Auto());
  Time now{0};
  for (int round = 0; round < 100; ++round) {
    quorum.Arrive(0, now, 1, false);
    quorum.Leave(1);  // as in a long evaluation
    now += 5s;
    quorum.Arrive(1, now, 1, false);
    quorum.Close({true, true}, now);
    quorum.Ended(now);
    now += 100ms;
  }
  EXPECT_EQ(quorum.quorum(), 2);
}

TEST(AutoQuorumTest, AsksForTheEndOfARoundNowAndThen) {
  AutoQuorum quorum(2, Auto());
  int asked = 0;
  for (int round = 1; round <= 32; ++round) {
    quorum.Close({true, true}, round * 10ms);
    asked += quorum.WantsEnd() ? 1 : 0;
    quorum.Ended(round * 10ms + 1ms);
    EXPECT_FALSE(quorum.WantsEnd());
  }
  EXPECT_EQ(asked, 4);
}

// --- In the coordinator

// Two ranks, and steps of 100 ms in which they use one bucket.
class TwoRanks {
 public:
  // Both ranks are as fast.
  void Even(const std::string& bucket, int steps) {
    for (int i = 0; i < steps; ++i) Cycle(bucket, "AA");
  }
  // Rank 1 takes three times as long.
  void Slow(const std::string& bucket, int steps) {
    for (int i = 0; i < steps; ++i)
      for (const char* says : {"A.", "..", ".A"}) Cycle(bucket, says);
  }
  // Both ranks have done with a bucket, which ends; and one more cycle.
  void End(const std::string& bucket) {
    Cycle(bucket, "XX");
    late_[0] = late_[1] = false;
    Cycle(bucket, "..", 1ms);
  }

  bool WantsCycle() const { return puppets_.coordinator.NextDeadline() <= puppets_.now; }
  bool HasChanged() const {
    return std::any_of(closings.begin(), closings.end(), [](const Closing& closing) { return closing.quorum == 1; });
  }
  std::vector<Closing> closings;

 private:
  // Arrivals are on time where the rank has taken all results, as after a round with everybody.
  void Cycle(const std::string& bucket, std::string says, Time passes = 100ms) {
    puppets_.now += passes;
    for (std::size_t rank = 0; rank < 2; ++rank)
      if (says[rank] == 'A' && std::exchange(late_[rank], false)) says[rank] = 'P';
    puppets_.Cycle(bucket + ":" + says);
    for (const Closing& closing : puppets_.last) {
      for (std::size_t rank = 0; rank < 2; ++rank) late_[rank] = !closing.contributions[rank].fresh;
      closings.push_back(closing);
    }
  }

  test::Puppets puppets_{2, Auto()};
  bool late_[2] = {false, false};
};

TEST(AutoCoordinatorTest, ClosingsCarryTheQuorumThatHeld) {
  TwoRanks slow;
  slow.Slow("a", 60);
  ASSERT_FALSE(slow.closings.empty());
  EXPECT_EQ(slow.closings.front().quorum, 2);
  int changes = 0;
  for (std::size_t i = 1; i < slow.closings.size(); ++i) {
    const Closing& closing = slow.closings[i];
    changes += closing.quorum != slow.closings[i - 1].quorum ? 1 : 0;
    EXPECT_GE(closing.fresh(), closing.quorum) << "round " << closing.round;
    EXPECT_TRUE(closing.quorum == 2 || closing.why == QuorumGuard::Why::kFaster) << "round " << closing.round;
  }
  EXPECT_GE(changes, 1);
}

TEST(AutoCoordinatorTest, TheSameReportsAreDecidedAlike) {
  const auto decide = [] {
    TwoRanks slow;
    slow.Slow("a", 60);
    std::vector<std::int32_t> words;
    for (const Closing& closing : slow.closings) Append(closing, words);
    return words;
  };
  EXPECT_EQ(decide(), decide());
}

// Of two buckets of the policy the last by name is followed: here one that is not used any more.
TEST(AutoCoordinatorTest, FollowsWhatIsUsed) {
  TwoRanks ranks;
  for (int i = 0; i < 20; ++i) {
    ranks.Even("a", 1);
    ranks.Even("b", 1);
  }
  ranks.Slow("a", 60);
  EXPECT_TRUE(ranks.HasChanged());
}

TEST(AutoCoordinatorTest, FollowsWhatIsLeftWhenABucketHasEnded) {
  TwoRanks ranks;
  for (int i = 0; i < 20; ++i) {
    ranks.Even("a", 1);
    ranks.Even("b", 1);
  }
  ranks.End("b");
  ranks.Slow("a", 60);
  EXPECT_TRUE(ranks.HasChanged());
}

TEST(AutoCoordinatorTest, AsksForNoCyclesWhenItsBucketsHaveEnded) {
  for (int rounds = 1; rounds <= 2 * AutoQuorum::kPeriod; ++rounds) {
    TwoRanks ranks;
    ranks.Even("a", rounds);
    ranks.End("a");
    EXPECT_FALSE(ranks.WantsCycle()) << "after " << rounds << " rounds";
  }
}

}  // namespace
}  // namespace horovod_partial
