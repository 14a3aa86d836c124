#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "core/rounds/statistics.h"

namespace horovod_partial {
namespace {

using testing::ElementsAre;
using testing::Pair;
using Reason = Closing::Reason;

Closing Make(Round round, Reason reason, std::vector<Closing::Contribution> contributions) {
  Closing closing;
  closing.round = round;
  closing.reason = reason;
  closing.contributions = std::move(contributions);
  return closing;
}

constexpr Closing::Contribution kFresh{1, true};
constexpr Closing::Contribution kPending{1, false};
constexpr Closing::Contribution kNothing{0, false};

TEST(StatisticsTest, CountsRoundsByReason) {
  BucketStatistics statistics;
  statistics.Record(Make(0, Reason::kFirst, {kFresh, kFresh}));
  statistics.Record(Make(1, Reason::kQuorum, {kFresh, kNothing}));
  statistics.Record(Make(2, Reason::kQuorum, {kFresh, kPending}));
  statistics.Record(Make(3, Reason::kEnd, {kNothing, kNothing}));
  EXPECT_EQ(statistics.rounds, 4);
  EXPECT_THAT(statistics.by_reason, ElementsAre(1, 0, 2, 0, 0, 1));
}

TEST(StatisticsTest, OnTimeMeansFresh) {
  BucketStatistics statistics;
  statistics.Record(Make(0, Reason::kFirst, {kFresh, kFresh, kFresh}));
  statistics.Record(Make(1, Reason::kQuorum, {kFresh, kNothing, kPending}));
  EXPECT_THAT(statistics.on_time, ElementsAre(2, 1, 1));
  EXPECT_THAT(statistics.late, ElementsAre(0, 1, 1));
  EXPECT_THAT(statistics.gradients, ElementsAre(2, 1, 1 + kPending.gradients));
  EXPECT_THAT(statistics.fresh, ElementsAre(0, 1, 0, 1)) << "one round with 1 fresh contributor, one with 3";
}

TEST(StatisticsTest, StalenessIsTheNumberOfRoundsBetweenContributions) {
  BucketStatistics statistics;
  statistics.Record(Make(0, Reason::kFirst, {kFresh, kFresh}));
  statistics.Record(Make(1, Reason::kQuorum, {kFresh, kNothing}));
  statistics.Record(Make(2, Reason::kQuorum, {kFresh, kNothing}));
  statistics.Record(Make(3, Reason::kQuorum, {kFresh, kPending}));
  statistics.Record(Make(4, Reason::kEverybody, {kFresh, kFresh}));
  EXPECT_THAT(statistics.staleness, ElementsAre(Pair(0, 7), Pair(2, 1)));
}

TEST(StatisticsTest, AnArrivalThatOnlyDeliversIsNoContribution) {
  BucketStatistics statistics;
  statistics.Record(Make(0, Reason::kFirst, {kFresh, kFresh}));
  statistics.Record(Make(1, Reason::kQuorum, {kFresh, {0, true}}));
  statistics.Record(Make(2, Reason::kEverybody, {kFresh, kFresh}));
  EXPECT_THAT(statistics.staleness, ElementsAre(Pair(0, 4), Pair(1, 1)));
  EXPECT_THAT(statistics.on_time, ElementsAre(3, 3));
}

TEST(StatisticsTest, ARankThatStartsLaterStartsFresh) {
  BucketStatistics statistics;  // of a rank that had joined for the first 7 rounds
  statistics.Record(Make(7, Reason::kQuorum, {kFresh, kFresh}));
  EXPECT_THAT(statistics.staleness, ElementsAre(Pair(0, 2)));
}

// --- Groups

constexpr Closing::Contribution kKept{1, false, true};

Closing InGroups(Closing closing, Partition groups) {
  closing.groups = std::move(groups);
  return closing;
}

TEST(GroupStatisticsTest, WhoIsInNoGroupIsNeitherOnTimeNorLate) {
  BucketStatistics statistics;
  statistics.Record(Make(0, Reason::kFirst, {kFresh, kFresh, kFresh, kFresh}));
  statistics.Record(
      InGroups(Make(1, Reason::kQuorum, {kFresh, kNothing, kFresh, kNothing}), {0, kNoGroup, 0, kNoGroup}));
  statistics.Record(InGroups(Make(2, Reason::kQuorum, {kFresh, kFresh, kFresh, kFresh}), {0, 1, 1, 0}));
  EXPECT_EQ(statistics.rounds, 3);
  EXPECT_THAT(statistics.on_time, ElementsAre(3, 2, 3, 2));
  EXPECT_THAT(statistics.late, ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(statistics.fresh, ElementsAre(0, 0, 1, 0, 2)) << "of all groups";
  EXPECT_THAT(statistics.staleness, ElementsAre(Pair(0, 8), Pair(1, 2)));
}

TEST(GroupStatisticsTest, AKeptModelIsNoNewContribution) {
  BucketStatistics statistics;
  statistics.Record(Make(0, Reason::kFirst, {kFresh, kFresh}));
  statistics.Record(InGroups(Make(1, Reason::kQuorum, {kFresh, kKept}), {0, 0}));
  statistics.Record(InGroups(Make(2, Reason::kQuorum, {kFresh, kPending}), {0, 0}));
  EXPECT_THAT(statistics.on_time, ElementsAre(3, 1));
  EXPECT_THAT(statistics.late, ElementsAre(0, 2));
  EXPECT_THAT(statistics.staleness, ElementsAre(Pair(0, 4), Pair(1, 1)));
}

TEST(GroupStatisticsTest, AFlushOfModelsIsNoRound) {
  BucketStatistics statistics;
  statistics.Record(Make(0, Reason::kFirst, {kFresh, kFresh}));
  statistics.Record(InGroups(Make(1, Reason::kFlush, {kNothing, kNothing}), {kNoGroup, kNoGroup}));
  EXPECT_EQ(statistics.rounds, 1);
  EXPECT_THAT(statistics.by_reason, ElementsAre(1, 0, 0, 0, 0, 0));
  EXPECT_THAT(statistics.late, ElementsAre(0, 0));
}

}  // namespace
}  // namespace horovod_partial
