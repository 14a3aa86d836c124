#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/groups/schedule.h"
#include "core/values/fields.h"

namespace horovod_partial {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Kind = Schedule::Kind;

Schedule Make(Kind kind, int group_size) {
  Schedule schedule;
  schedule.kind = kind;
  schedule.group_size = group_size;
  return schedule;
}

std::vector<Members> Groups(const Schedule& schedule, Round round, int size) {
  return GroupsOf(GroupsOf(schedule, round, size));
}

// The fewest rounds in which a change on one rank can reach all others.
int RoundsToReachAll(int group_size, int size) {
  int rounds = 0;
  for (long reached = 1; reached < size; reached *= group_size) ++rounds;
  return rounds;
}

// Values of all ranks, averaged in the groups of a round.
void Average(std::vector<double>& values, const std::vector<Members>& groups) {
  for (const Members& group : groups) {
    double sum = 0;
    for (const Rank rank : group) sum += values[static_cast<std::size_t>(rank)];
    for (const Rank rank : group) values[static_cast<std::size_t>(rank)] = sum / static_cast<double>(group.size());
  }
}

double Spread(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end()) - *std::min_element(values.begin(), values.end());
}

class MixingTest : public testing::Test {
 protected:
  std::vector<double> RandomValues(int size) {
    std::vector<double> values;
    for (int i = 0; i < size; ++i) values.push_back(std::uniform_real_distribution<double>(-1, 1)(random_));
    return values;
  }
  std::mt19937 random_{1};
};

// The ranks whose first value has reached each rank, after these rounds.
std::vector<std::set<Rank>> Reached(const Schedule& schedule, int rounds, int size) {
  std::vector<std::set<Rank>> reached(static_cast<std::size_t>(size));
  for (Rank rank = 0; rank < size; ++rank) reached[static_cast<std::size_t>(rank)] = {rank};
  for (Round round = 0; round < rounds; ++round) {
    for (const Members& group : Groups(schedule, round, size)) {
      std::set<Rank> all;
      for (const Rank rank : group)
        all.insert(reached[static_cast<std::size_t>(rank)].begin(), reached[static_cast<std::size_t>(rank)].end());
      for (const Rank rank : group) reached[static_cast<std::size_t>(rank)] = all;
    }
  }
  return reached;
}

// --- WAGMA-SGD's own cases

TEST(ButterflyTest, GivesThePapersExample) {  // section 3.2; its Algorithm 1 gives pairs at t = 1
  const Schedule schedule = Make(Kind::kButterfly, 4);
  EXPECT_THAT(Groups(schedule, 0, 8), ElementsAre(Members{0, 1, 2, 3}, Members{4, 5, 6, 7}));
  EXPECT_THAT(Groups(schedule, 1, 8), ElementsAre(Members{0, 1, 4, 5}, Members{2, 3, 6, 7}));
  EXPECT_THAT(Groups(schedule, 2, 8), ElementsAre(Members{0, 2, 4, 6}, Members{1, 3, 5, 7}));
  EXPECT_EQ(GroupsOf(schedule, 3, 8), GroupsOf(schedule, 0, 8));
}

TEST(ButterflyTest, PairsDifferInOneBit) {
  const Schedule schedule = Make(Kind::kButterfly, 2);
  EXPECT_THAT(Groups(schedule, 0, 8), ElementsAre(Members{0, 1}, Members{2, 3}, Members{4, 5}, Members{6, 7}));
  EXPECT_THAT(Groups(schedule, 1, 8), ElementsAre(Members{0, 2}, Members{1, 3}, Members{4, 6}, Members{5, 7}));
  EXPECT_THAT(Groups(schedule, 2, 8), ElementsAre(Members{0, 4}, Members{1, 5}, Members{2, 6}, Members{3, 7}));
}

TEST_F(MixingTest, TheButterflyOfPowersOfTwoLeavesNoSpread) {  // C2
  for (int size = 2; size <= 64; size *= 2) {
    for (int group_size = 2; group_size <= size; group_size *= 2) {
      for (const Round start : {0, 1, 7}) {
        auto values = RandomValues(size);
        for (int i = 0; i < RoundsToReachAll(group_size, size); ++i)
          Average(values, Groups(Make(Kind::kButterfly, group_size), start + i, size));
        EXPECT_LT(Spread(values), 1e-6) << group_size << " of " << size << " from round " << start;
      }
    }
  }
}

// --- Butterflies of any number of ranks

constexpr int kMost = 20;

TEST(AnyButterflyTest, PutsEveryRankIntoOneGroup) {
  const std::set<int> powers = {1, 2, 4, 8, 16};
  for (int size = 1; size <= kMost; ++size) {
    for (int group_size = 1; group_size <= kMost; ++group_size) {
      for (Round round = 0; round < 2 * kMost; ++round) {
        const Partition partition = GroupsOf(Make(Kind::kButterfly, group_size), round, size);
        ASSERT_EQ(partition.size(), static_cast<std::size_t>(size));
        std::size_t ranks = 0;
        for (const Members& group : GroupsOf(partition)) {
          ASSERT_THAT(group, testing::Not(IsEmpty()));
          ASSERT_LE(group.size(), static_cast<std::size_t>(group_size)) << group_size << " of " << size;
          ranks += group.size();
          if (powers.count(size) == 0 || powers.count(group_size) == 0 || group_size > size) continue;
          ASSERT_EQ(group.size(), static_cast<std::size_t>(group_size)) << "C1, of " << size;
        }
        ASSERT_EQ(ranks, static_cast<std::size_t>(size));
      }
    }
  }
}

TEST(AnyButterflyTest, ComesAgainAfterItsCycleAndNotBefore) {
  for (int size = 1; size <= kMost; ++size) {
    for (int group_size = 1; group_size <= kMost; ++group_size) {
      const Schedule schedule = Make(Kind::kButterfly, group_size);
      SCOPED_TRACE(std::to_string(group_size) + " of " + std::to_string(size));
      const Round cycle = CycleOf(schedule, size);
      ASSERT_GE(cycle, 1);
      for (Round round = 0; round < 2 * cycle; ++round)
        ASSERT_EQ(GroupsOf(schedule, round, size), GroupsOf(schedule, round + cycle, size)) << round;
      for (Round shorter = 1; shorter < cycle; ++shorter) {
        bool differs = false;
        for (Round round = 0; round < cycle; ++round)
          differs = differs || GroupsOf(schedule, round, size) != GroupsOf(schedule, round + shorter, size);
        EXPECT_TRUE(differs) << "after " << shorter << " already, not only after " << cycle;
      }
    }
  }
}

TEST_F(MixingTest, TheSpreadShrinksInEveryCycle) {
  for (int size = 2; size <= kMost; ++size) {
    for (int group_size = 2; group_size <= kMost; ++group_size) {
      const Schedule schedule = Make(Kind::kButterfly, group_size);
      SCOPED_TRACE(std::to_string(group_size) + " of " + std::to_string(size));
      const Round cycle = CycleOf(schedule, size);
      auto values = RandomValues(size);
      const double mean = std::accumulate(values.begin(), values.end(), 0.0) / size;
      double spread = Spread(values);
      for (int i = 0; i < 4 && spread > 1e-9; ++i) {
        for (Round round = 0; round < cycle; ++round) Average(values, Groups(schedule, i * cycle + round, size));
        ASSERT_LT(Spread(values), spread) << "cycle " << i;
        spread = Spread(values);
      }
      EXPECT_NEAR(std::accumulate(values.begin(), values.end(), 0.0) / size, mean, 1e-12);
    }
  }
}

TEST(AnyButterflyTest, ConnectsAllRanksInACycle) {
  for (int size = 2; size <= kMost; ++size)
    for (int group_size = 2; group_size <= kMost; ++group_size)
      for (const auto& reached :
           Reached(Make(Kind::kButterfly, group_size),
                   size * static_cast<int>(CycleOf(Make(Kind::kButterfly, group_size), size)), size))
        ASSERT_EQ(reached.size(), static_cast<std::size_t>(size)) << group_size << " of " << size;
}

TEST(AnyButterflyTest, LateRoundsAreComputedToo) {
  constexpr Round kLate = (Round{1} << 60) + 1;
  for (const int size : {8, 12}) {
    const Schedule schedule = Make(Kind::kButterfly, 4);
    EXPECT_EQ(GroupsOf(schedule, kLate, size), GroupsOf(schedule, kLate % CycleOf(schedule, size), size));
  }
}

TEST(AnyButterflyTest, GroupsOfMoreThanAllAreAll) {
  for (int size = 1; size <= kMost; ++size)
    EXPECT_EQ(GroupsOf(Make(Kind::kButterfly, size + 3), 5, size), Partition(static_cast<std::size_t>(size), 0))
        << size;
}

// --- The other kinds

TEST(TableTest, IsReadFromTheStartAgain) {
  Schedule schedule;
  schedule.kind = Kind::kTable;
  schedule.table = {{0, 0, 1}, {0, 1, 0}};
  EXPECT_EQ(CycleOf(schedule, 3), 2);
  for (Round round = 0; round < 6; ++round)
    EXPECT_EQ(GroupsOf(schedule, round, 3), schedule.table[static_cast<std::size_t>(round % 2)]) << round;
}

TEST(NoScheduleTest, IsOfAllRanks) {
  EXPECT_EQ(CycleOf(Schedule{}, 4), 0);
  EXPECT_THAT(GroupsOf(Schedule{}, 3, 4), IsEmpty());
}

TEST(ScheduleTest, KindsHaveNames) {
  EXPECT_EQ(FromName<Kind>("schedule", "none"), Kind::kNone);
  EXPECT_EQ(FromName<Kind>("schedule", "butterfly"), Kind::kButterfly);
  EXPECT_EQ(FromName<Kind>("schedule", "table"), Kind::kTable);
  EXPECT_THROW(FromName<Kind>("schedule", "tree"), std::invalid_argument);
}

// --- Partitions

TEST(GroupsTest, OfAPartitionAndBack) {
  const Partition partition = {1, 0, kNoGroup, 1, 0};
  EXPECT_THAT(GroupsOf(partition), ElementsAre(Members{1, 4}, Members{0, 3}));
  EXPECT_EQ(PartitionOf(GroupsOf(partition), 5), partition);
  EXPECT_THAT(GroupOf(partition, 3, 5), ElementsAre(0, 3));
  EXPECT_THAT(GroupOf(partition, 2, 5), IsEmpty());
}

TEST(GroupsTest, WithoutAPartitionAllAreTogether) {
  EXPECT_THAT(GroupOf({}, 1, 3), ElementsAre(0, 1, 2));
  EXPECT_THAT(GroupsOf(Partition{}), IsEmpty());
  EXPECT_THAT(PartitionOf({}, 2), ElementsAre(kNoGroup, kNoGroup));
}

}  // namespace
}  // namespace horovod_partial
