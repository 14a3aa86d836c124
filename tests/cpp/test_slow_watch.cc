#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/watch/slow_watch.h"

namespace horovod_partial {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

// Ranks that take steps of given lengths, five in a heartbeat.
struct Ranks {
  explicit Ranks(int size) : watch(size), seconds(static_cast<std::size_t>(size), 0.1) {}

  // Returns what was told within so many heartbeats.
  std::vector<std::string> Run(int beats) {
    std::vector<std::string> told;
    for (int i = 0; i < beats; ++i) {
      for (std::size_t rank = 0; rank < seconds.size(); ++rank) {
        Beat beat;
        const Parts parts{{loads ? seconds[rank] - 0.09 : -1, -1, 0.09, -1, -1}};
        for (int step = 0; step < 5; ++step)
          beat.steps.ended.push_back({number + step, seconds[rank] + (rank == 2 && step == 0 ? pause : 0), parts});
        if (rank == 2) beat.signs.throttled = 0.4;
        watch.Says(static_cast<Rank>(rank), beat);
      }
      number += 5;
      if (const std::string line = watch.Pass(); !line.empty()) told.push_back(line);
    }
    return told;
  }

  SlowWatch watch;
  std::vector<double> seconds;
  double pause = 0;  // by how many seconds the first step of each heartbeat is longer on rank 2
  std::int64_t number = 0;
  bool loads = false;  // true if the loader is seen, so that the parts of a step are known
};

TEST(SlowWatchTest, TellsOnceWhoIsSlowAndWhenItIsOver) {
  Ranks ranks(3);
  EXPECT_TRUE(ranks.Run(4).empty());
  ranks.seconds[2] = 0.2;
  const auto begins = ranks.Run(4);
  ASSERT_EQ(begins.size(), 1U);
  EXPECT_THAT(begins[0], AllOf(StartsWith("rank 2 takes 2.0 times (95 %: 2.0 to 2.0) as long as the median rank, in "),
                               EndsWith(" since step 20 (its cgroup is throttled in 40 % of the scheduling periods)")));
  ranks.seconds[2] = 0.1;
  const auto ends = ranks.Run(8);
  ASSERT_EQ(ends.size(), 1U);
  EXPECT_THAT(ends[0], EndsWith("in 20 of 20 steps from step 20 to 39, and is not slow any more"));
}

TEST(SlowWatchTest, TellsWhoPausesAndWhenThatIsOver) {
  Ranks ranks(8);
  std::vector<std::string> told;
  for (int i = 0; i < 10; ++i) {
    for (const std::string& line : ranks.Run(9)) told.push_back(line);
    ranks.pause = 1;
    for (const std::string& line : ranks.Run(1)) told.push_back(line);
    ranks.pause = 0;
  }
  ASSERT_EQ(told.size(), 1U);
  EXPECT_THAT(told[0], AllOf(StartsWith("rank 2 pauses for 1.00 s every 50 steps: the others wait for it for "),
                             EndsWith("since step 45 (its cgroup is throttled in 40 % of the scheduling periods)")));
  const auto over = ranks.Run(40);
  ASSERT_EQ(over.size(), 1U);
  EXPECT_THAT(over[0], EndsWith(" from step 45 to 495, and pauses no more"));
}

TEST(SlowWatchTest, TellsThePartThatExplainsIt) {
  Ranks ranks(3);
  ranks.loads = true;
  EXPECT_TRUE(ranks.Run(4).empty());
  EXPECT_NEAR(ranks.watch.ranks()[0].parts[Part::kLoader], 0.2, 1e-9);
  ranks.seconds[1] = 0.2;
  const auto told = ranks.Run(4);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_THAT(told[0], EndsWith(" since step 20: 100 % of the excess is waiting for data"));
  EXPECT_EQ(ranks.watch.ranks()[1].part, "loader");
  EXPECT_EQ(ranks.watch.ranks()[0].part, "none");
  ranks.seconds[1] = 0.1;
  ranks.Run(8);
  EXPECT_EQ(ranks.watch.ranks()[1].part, "none") << "it is not slow any more";
}

TEST(SlowWatchTest, SeveralRanksAreToldInOneLine) {
  Ranks ranks(8);
  ranks.seconds[2] = ranks.seconds[5] = 0.2;
  const auto told = ranks.Run(4);
  ASSERT_EQ(told.size(), 1U);
  EXPECT_THAT(told[0], AllOf(StartsWith("rank 2 takes "), HasSubstr("; rank 5 takes ")));
}

TEST(SlowWatchTest, ARankThatHasJoinedOrEndedHoldsNothingUp) {
  Ranks ranks(5);
  EXPECT_TRUE(ranks.Run(4).empty());
  ranks.watch.Gone(4);
  ranks.watch.Says(3, {{Activity::Kind::kResting, "a join", {}, 0}, {}, {}});
  ranks.seconds.resize(3);
  ranks.seconds[2] = 0.3;
  EXPECT_EQ(ranks.Run(4).size(), 1U);
}

TEST(SlowWatchTest, KnowsOfEachRankWhatItHasTold) {
  Ranks ranks(3);
  EXPECT_TRUE(ranks.watch.ranks().empty()) << "steps are not watched yet";
  ranks.seconds[1] = 0.2;
  ranks.Run(4);
  ranks.watch.Says(0, {{}, {{}, 1000, 2.5}, {}});
  const auto known = ranks.watch.ranks();
  ASSERT_EQ(known.size(), 3U);
  EXPECT_EQ(known[0].steps, 20);
  EXPECT_EQ(known[0].bytes, 1000);
  EXPECT_DOUBLE_EQ(known[0].step_seconds, 2.5);
  EXPECT_DOUBLE_EQ(known[1].compute_seconds, 4.0);
  EXPECT_NEAR(known[2].signs.throttled, 0.4, 1e-9);
  ASSERT_TRUE(known[1].slowness);
  EXPECT_DOUBLE_EQ(known[1].slowness->factor, 2.0);
  EXPECT_FALSE(known[2].slowness);
  ranks.seconds[1] = 0.1;
  ranks.Run(8);
  EXPECT_FALSE(ranks.watch.ranks()[1].slowness) << "it is not slow any more";
}

TEST(MachineSignsTest, OnlyWhatStandsOutIsTold) {
  EXPECT_EQ(Describe(MachineSigns{}), "");
  EXPECT_EQ(Describe(MachineSigns{0.52, 0.01, 0, 0.02}), " (it uses 0.5 processors)");
  EXPECT_EQ(
      Describe(MachineSigns{0.5, 0.2, 0.4, 0.3}),
      " (it uses 0.5 processors; its cgroup is throttled in 40 % of the scheduling periods; the hypervisor of its "
      "host takes 20 % of the processor time; processes on its host wait for a processor 30 % of the time)");
}

}  // namespace
}  // namespace horovod_partial
