#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/coordinator.h"
#include "harness/others.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Policy Quorum(int quorum, Round max_staleness = 16) {
  Policy policy;
  policy.quorum = quorum;
  policy.max_staleness = max_staleness;
  policy.grace = 0ms;
  policy.description = "Quorum(" + std::to_string(quorum) + ")";
  return policy;
}

Policy RandomInitiator(std::uint64_t seed) {
  Policy policy = Quorum(1);
  policy.rule = Policy::Rule::kInitiator;
  policy.seed = seed;
  policy.description = "Majority(initiator='random')";
  return policy;
}

// Models in pairs along a butterfly.
Policy Pairs(Round period = 0, int quorum = 1, Round max_staleness = 16) {
  Policy policy = Quorum(quorum, max_staleness);
  policy.schedule.kind = Schedule::Kind::kButterfly;
  policy.schedule.group_size = 2;
  policy.period = period;
  policy.description = "GroupAverage(2)";
  return policy;
}

// Models of the first ranks that are ready.
Policy Ready(int group_size, int window = 8) {
  Policy policy = Quorum(1);
  policy.rule = Policy::Rule::kReady;
  policy.group_size = group_size;
  policy.window = window;
  policy.description = "PartialReduce(" + std::to_string(group_size) + ")";
  return policy;
}

// A coordinator whose ranks are puppets. What they say is written as one letter for each rank:
//   .  computes         A  arrives with a gradient     D  arrives with nothing but what is pending, which is nothing
//   P  has a gradient pending     B  is blocked        b  is blocked, with a gradient pending
//   K  has a model that was in a round before          k  is blocked, with such a model
//   W  waits for a round, or for a flush
//   R  computes, while a device still reduces the round before
//   C  arrives, and asks for a full round, as after a Clear
//   X  has retired the bucket     x  so, with a gradient pending
//   F  is in a flush    E  is in a flush at its end    f, e  so, with a gradient pending     J  has joined
class Puppets {
 public:
  Puppets(int size, Policy policy) : coordinator(size), policy_(std::move(policy)) {}

  // One cycle. Gives the closings as "reason contributions", with F for a fresh contribution, p for a pending one and -
  // for none; several are separated by commas, and name their bucket if `letters` is for several buckets.
  std::string Cycle(const std::map<std::string, std::string>& letters) {
    const std::size_t size = letters.begin()->second.size();
    std::vector<bool> joined(size);
    for (std::size_t rank = 0; rank < size; ++rank) {
      Report report;
      for (const auto& [bucket, row] : letters) {
        const char letter = row[rank];
        if (letter == 'A' || letter == 'C' || letter == 'D') AddArrival(report, bucket, letter);
        if (letter == 'R') AddRunning(report, bucket);
        if (letter == 'X' || letter == 'x') AddRetired(report, bucket, letter == 'x' ? 1 : 0);
        if (letter == 'P' || letter == 'b' || letter == 'f' || letter == 'e') AddPending(report, bucket);
        if (letter == 'K' || letter == 'k') AddPending(report, bucket, 0);
        if (letter == 'B' || letter == 'b' || letter == 'k') report.absent.all = true;
        if (letter == 'W') report.waiting.all = true;
        if (letter == 'F' || letter == 'f') report.flush = Report::Flush::kFlushing;
        if (letter == 'E' || letter == 'e') report.flush = Report::Flush::kEnding;
        if (report.flush != Report::Flush::kNone) report.absent.all = true;
        report.blocked = report.absent.all || report.waiting.all;
        if (letter == 'J') joined[rank] = true;
      }
      coordinator.Observe(static_cast<Rank>(rank), report, now);
    }
    coordinator.SetJoined(joined);
    last = coordinator.Decide(now);
    std::string text;
    for (const Closing& closing : last) {
      if (!text.empty()) text += ", ";
      if (letters.size() > 1) text += closing.bucket + " ";
      text += std::string(NameOf(closing.reason)) + " ";
      for (const auto& contribution : closing.contributions)
        text += contribution.fresh ? 'F' : contribution.gradients > 0 ? 'p' : '-';
      if (closing.ends) text += " and ends";
      if (closing.ends) seen_.erase(closing.bucket);
      if (closing.reason != Closing::Reason::kFirst) continue;
      seen_.insert(closing.bucket);
    }
    return text;
  }
  std::string Cycle(const std::string& letters) { return Cycle({{"a", letters}}); }

  Coordinator coordinator;
  Time now{0};
  Time age{0};  // of what is pending
  std::vector<Closing> last;

 private:
  void AddArrival(Report& report, const std::string& bucket, char letter) {
    Report::Item item;
    item.bucket = bucket;
    item.gradients = letter == 'D' ? 0 : 1;
    item.full = letter == 'C';
    if (seen_.count(bucket) == 0) item.declaration = Declaration{policy_};
    report.items.push_back(item);
  }
  static void AddRunning(Report& report, const std::string& bucket) {
    Report::Item item;
    item.kind = Report::Item::Kind::kRunning;
    item.bucket = bucket;
    report.items.push_back(item);
  }
  static void AddRetired(Report& report, const std::string& bucket, int gradients) {
    Report::Item item;
    item.kind = Report::Item::Kind::kRetired;
    item.bucket = bucket;
    item.gradients = item.late = gradients;
    report.items.push_back(item);
  }
  void AddPending(Report& report, const std::string& bucket, int late = 1) {
    Report::Item item;
    item.kind = Report::Item::Kind::kPending;
    item.bucket = bucket;
    item.gradients = 1;
    item.late = late;
    item.age = age;
    report.items.push_back(item);
  }

  Policy policy_;
  std::set<std::string> seen_;  // buckets that have had a round
};

// --- Rules, one cycle after the other

struct Case {
  std::string name;
  Policy policy;
  std::vector<std::pair<std::string, std::string>> cycles;  // what the ranks say -> what closes
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class RuleTest : public testing::TestWithParam<Case> {};

TEST_P(RuleTest, Decides) {
  const Case& c = GetParam();
  Puppets puppets(static_cast<int>(c.cycles[0].first.size()), c.policy);
  for (std::size_t i = 0; i < c.cycles.size(); ++i) {
    const auto& [says, closes] = c.cycles[i];
    EXPECT_EQ(puppets.Cycle(says), closes) << "cycle " << i << ": " << says;
  }
}

const Case kRoundZero[] = {
    {"IsFull", Quorum(1), {{"A..", ""}, {".A.", ""}, {"..A", "first FFF"}}},
    {"WaitsForBlockedRanks", Quorum(1), {{"AB.", ""}, {".BB", ""}, {".AA", "first FFF"}}},
    {"CountsJoinedRanksOut", Quorum(3), {{"A.J", ""}, {".AJ", "first FF-"}}},
    {"OfOneRank", Quorum(1), {{"A", "first F"}, {"A", "everybody F"}}},
    {"MayBeAnArrivalThatOnlyDelivers", Quorum(1), {{"AAD", "first FFF"}}},
};

const Case kQuorum[] = {
    {"OfOne", Quorum(1), {{"AAA", "first FFF"}, {".A.", "quorum -F-"}, {"..A", "quorum --F"}}},
    {"OfTwo", Quorum(2), {{"AAA", "first FFF"}, {"A..", ""}, {"...", ""}, {".A.", "quorum FF-"}}},
    {"OfThreeIsEverybody", Quorum(3), {{"AAA", "first FFF"}, {"AA.", ""}, {"..A", "everybody FFF"}}},
    {"EverybodyAtOnce", Quorum(1), {{"AAA", "first FFF"}, {"AAA", "everybody FFF"}}},
    {"BeyondTheSizeIsEverybody", Quorum(9), {{"AAA", "first FFF"}, {"AA.", ""}, {"..A", "everybody FFF"}}},
    {"OfTheActiveRanksOnly", Quorum(3), {{"AAA", "first FFF"}, {"A.J", ""}, {".AJ", "everybody FF-"}}},
    {"PendingIsNoArrival", Quorum(2), {{"AAA", "first FFF"}, {"APP", ""}, {".AP", "quorum FFp"}}},
    {"NothingClosesWithoutAnArrival", Quorum(1), {{"AAA", "first FFF"}, {"PPP", ""}, {"BBB", ""}, {"bbb", ""}}},
    {"PendingTravelsWithTheRound", Quorum(1), {{"AAA", "first FFF"}, {"AP.", "quorum Fp-"}, {"A..", "quorum F--"}}},
    {"AnArrivalThatOnlyDeliversCounts", Quorum(2), {{"AAA", "first FFF"}, {"AD.", "quorum FF-"}}},
};

const Case kStaleness[] = {
    {"ZeroIsEverybody", Quorum(1, 0), {{"AAA", "first FFF"}, {"AA.", ""}, {"..A", "everybody FFF"}}},
    {"OneRoundMayBeMissed",
     Quorum(1, 1),
     {{"AAA", "first FFF"}, {"AA.", "quorum FF-"}, {"AA.", ""}, {"..A", "everybody FFF"}}},
    {"PendingCountsAsContributing",
     Quorum(1, 1),
     {{"AAA", "first FFF"}, {"AA.", "quorum FF-"}, {"AA.", ""}, {"..P", "quorum FFp"}}},
    {"PendingStartsTheCountAnew",
     Quorum(1, 1),
     {{"AAA", "first FFF"}, {"AAP", "quorum FFp"}, {"AA.", "quorum FF-"}, {"AA.", ""}}},
    {"DeliveringNothingDoesNot", Quorum(1, 1), {{"AAA", "first FFF"}, {"AAD", "everybody FFF"}, {"AA.", ""}}},
    {"JoinedRanksAreExempt", Quorum(1, 0), {{"AAA", "first FFF"}, {"A.J", ""}, {".AJ", "everybody FF-"}}},
    {"BlockedRanksAreExempt",
     Quorum(1, 0),
     {{"AAA", "first FFF"}, {"AAB", "quorum FF-"}, {"AAB", "quorum FF-"}, {"AA.", ""}}},
    {"WaitingRanksAreNot", Quorum(1, 0), {{"AAA", "first FFF"}, {"AAW", "liveness FF-"}, {"AA.", ""}}},
    {"FlushingRanksAreExempt", Quorum(1, 0), {{"AAA", "first FFF"}, {"AAF", "quorum FF-"}, {"AAE", "quorum FF-"}}},
    {"ComesBeforeTheQuorum",
     Quorum(2, 1),
     {{"AAA", "first FFF"}, {"AA.", "quorum FF-"}, {"AA.", ""}, {"..B", "quorum FF-"}}},
    {"IsCountedForEachRank",
     Quorum(1, 2),
     {{"AAA", "first FFF"}, {"A..", "quorum F--"}, {".A.", "quorum -F-"}, {"A..", ""}, {"..A", "quorum F-F"}}},
};

const Case kFullRounds[] = {
    {"WaitForEverybody", Quorum(1), {{"AAA", "first FFF"}, {"C..", ""}, {".A.", ""}, {"..A", "everybody FFF"}}},
    {"WhoeverAsks", Quorum(1), {{"AAA", "first FFF"}, {".C.", ""}, {"A.A", "everybody FFF"}}},
    {"ForOneRoundOnly", Quorum(1), {{"AAA", "first FFF"}, {"CAA", "everybody FFF"}, {"A..", "quorum F--"}}},
    {"WithoutJoinedRanks", Quorum(1), {{"AAA", "first FFF"}, {"C.J", ""}, {".AJ", "everybody FF-"}}},
    {"GiveWayToLiveness", Quorum(1), {{"AAA", "first FFF"}, {"CB.", ""}, {".BB", "liveness F--"}}},
};

const Case kLiveness[] = {
    {"WhenAllOthersAreBlocked", Quorum(2), {{"AAA", "first FFF"}, {"A..", ""}, {".B.", ""}, {".BB", "liveness F--"}}},
    {"WhenAllOthersWait", Quorum(2), {{"AAA", "first FFF"}, {"AW.", ""}, {".WW", "liveness F--"}}},
    {"WhenAllOthersHaveJoined", Quorum(3), {{"AAA", "first FFF"}, {"A.J", ""}, {".BJ", "liveness F--"}}},
    {"WhenAllOthersFlushOrEnd", Quorum(2), {{"AAA", "first FFF"}, {"A..", ""}, {".FE", "liveness F--"}}},
    {"TakesWhatTheyHavePending", Quorum(2), {{"AAA", "first FFF"}, {"A..", ""}, {".bf", "liveness Fpp"}}},
    {"OverridesStaleness", Quorum(3, 0), {{"AAA", "first FFF"}, {"ABB", "liveness F--"}, {"ABB", "liveness F--"}}},
    {"NotWhileARankComputes", Quorum(2), {{"AAA", "first FFF"}, {"AB.", ""}, {".B.", ""}}},
    {"BlockedIsALevel", Quorum(2), {{"AAA", "first FFF"}, {"AB.", ""}, {"..B", ""}, {".BB", "liveness F--"}}},
    {"NeedsAnArrival", Quorum(2), {{"AAA", "first FFF"}, {"BBB", ""}, {"FBB", ""}}},
    {"NeverForRoundZeroAndParkedRanks", Quorum(1), {{"ABB", ""}, {".BB", ""}}},
    {"RoundZeroFailsWhenTheOthersAreGone", Quorum(1), {{"A..", ""}, {".F.", ""}, {".FE", "liveness F--"}}},
};

const Case kFlush[] = {
    {"WhenAllFlush", Quorum(2), {{"AAA", "first FFF"}, {"FF.", ""}, {"FFF", "flush ---"}}},
    {"DeliversWhatIsPending", Quorum(2), {{"AAA", "first FFF"}, {"fFf", "flush p-p"}}},
    {"TheEndIsOneToo", Quorum(2), {{"AAA", "first FFF"}, {"EEe", "end --p"}}},
    {"SomeEndOthersFlush", Quorum(2), {{"AAA", "first FFF"}, {"EFE", "flush ---"}, {"EEE", "end ---"}}},
    {"JoinedRanksNeedNotCome", Quorum(2), {{"AAA", "first FFF"}, {"FJJ", "flush ---"}}},
    {"WhatHasArrivedGoesFirst",
     Quorum(2),
     {{"AAA", "first FFF"}, {"A..", ""}, {"FFF", "liveness F--"}, {"FFF", "flush ---"}}},
    {"NotWhenEverybodyHasJoined", Quorum(2), {{"AAA", "first FFF"}, {"JJJ", ""}}},
    {"NothingWithoutABucket", Quorum(2), {{"FFF", ""}, {"EEE", ""}}},
};

const Case kScheduled[] = {
    {"KeptModelsStandIn", Pairs(), {{"AAAA", "first FFFF"}, {"AKKK", "quorum Fppp"}, {"KAKK", "quorum pFpp"}}},
    {"NobodyWaits", Pairs(), {{"AAAA", "first FFFF"}, {"AKK.", "quorum Fpp-"}}},
    {"FullRoundsWaitForAll",
     Pairs(2),
     {{"AAAA", "first FFFF"},
      {"AAAK", ""},
      {"...A", "everybody FFFF"},
      {"A...", "quorum F---"},
      {".A..", ""},
      {"A.AA", "everybody FFFF"}}},
    {"FullRoundsCountJoinedRanksOut", Pairs(2), {{"AAAA", "first FFFF"}, {"AA.J", ""}, {"..AJ", "everybody FFF-"}}},
    {"FullRoundsGiveWayToLiveness", Pairs(2), {{"AAAA", "first FFFF"}, {"AkB.", ""}, {".kBW", "liveness Fp--"}}},
    {"AKeptModelIsNoNews",
     Pairs(0, 1, 1),
     {{"AAAA", "first FFFF"}, {"AAAK", "quorum FFFp"}, {"AAAK", ""}, {"...K", ""}, {"...A", "everybody FFFF"}}},
    {"ALateArrivalIs",
     Pairs(0, 1, 1),
     {{"AAAA", "first FFFF"}, {"AAAK", "quorum FFFp"}, {"AAAP", "quorum FFFp"}, {"AAAK", "quorum FFFp"}, {"AAAK", ""}}},
    {"AModelThatIsTooOldIsLeftOut",
     Pairs(0, 1, 1),
     {{"AAAA", "first FFFF"}, {"AAAk", "quorum FFFp"}, {"AAAk", "quorum FFF-"}, {"AAAb", "quorum FFFp"}}},
    {"AFlushDeliversNothing", Pairs(), {{"AAAA", "first FFFF"}, {"FFFF", "flush ----"}, {"ffff", "flush ----"}}},
    {"AnEndIsNoRoundEither", Pairs(2), {{"AAAA", "first FFFF"}, {"EEEE", "end ----"}}},
};

const Case kReadyRanks[] = {
    {"RoundZeroIsFull", Ready(2), {{"AA..", ""}, {"..A.", ""}, {"...A", "first FFFF"}}},
    {"FirstComeFirstServed", Ready(2), {{"AAAA", "first FFFF"}, {"...A", ""}, {".A..", "quorum -F-F"}}},
    {"SeveralGroupsInOneRound", Ready(2), {{"AAAA", "first FFFF"}, {"AAAA", "quorum FFFF"}}},
    {"LessThanAGroupWaits", Ready(3), {{"AAAA", "first FFFF"}, {"AA..", ""}, {"....", ""}, {"..A.", "quorum FFF-"}}},
    {"AFullArrivalWaitsForAll",
     Ready(2),
     {{"AAAA", "first FFFF"}, {"C...", ""}, {".AA.", ""}, {"...A", "everybody FFFF"}, {"AA..", "quorum FF--"}}},
    {"WhenFewerAreLeft",
     Ready(3),
     {{"AAAA", "first FFFF"},
      {"A..E", ""},
      {".A.E", ""},
      {"..EE", "liveness FF--"},
      {"A.EE", ""},
      {".BEE", "liveness F---"}}},
    {"WhenOneIsLeft", Ready(2), {{"AAAA", "first FFFF"}, {"AFJ.", ""}, {".FJW", "liveness F---"}}},
    {"AFlushHasNoGroups", Ready(2), {{"AAAA", "first FFFF"}, {"FFFF", "flush ----"}, {"EEEE", "end ----"}}},
    {"WhatHasArrivedGoesBeforeAFlush",
     Ready(2),
     {{"AAAA", "first FFFF"}, {"A...", ""}, {"FFFF", "liveness F---"}, {"FFFF", "flush ----"}}},
    {"TheLastRoundHasEndedEverywhere",
     Ready(2),
     {{"AAAA", "first FFFF"}, {"AARA", ""}, {"..R.", ""}, {"....", "quorum FF--"}}},
};

const auto kNameOfCase = [](const testing::TestParamInfo<Case>& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(RoundZero, RuleTest, testing::ValuesIn(kRoundZero), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Quorum, RuleTest, testing::ValuesIn(kQuorum), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Staleness, RuleTest, testing::ValuesIn(kStaleness), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(FullRound, RuleTest, testing::ValuesIn(kFullRounds), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Liveness, RuleTest, testing::ValuesIn(kLiveness), kNameOfCase);
const Case kEnds[] = {
    {"WhenAllHaveRetiredIt", Quorum(1), {{"AAA", "first FFF"}, {"XX.", ""}, {"XXX", "end --- and ends"}, {"...", ""}}},
    {"ByARoundIfSomethingIsPending", Quorum(1), {{"AAA", "first FFF"}, {"XxX", "end -p- and ends"}}},
    {"NotWhileARankArrives", Quorum(2), {{"AAA", "first FFF"}, {"X.A", ""}, {"XX.", "liveness --F"}}},
    {"NotWhileADeviceReduces", Quorum(1), {{"AAA", "first FFF"}, {"XXR", ""}, {"XXX", "end --- and ends"}}},
    {"ARetiredRankIsExempt",
     Quorum(1, 2),
     {{"AAX", ""},
      {"..A", "first FFF"},
      {"A.X", "quorum F--"},
      {"A.X", "quorum F--"},
      {"A.X", ""},
      {".AX", "quorum FF-"}}},
    {"AnArrivalUnretires",
     Quorum(1),
     {{"AAA", "first FFF"}, {"XX.", ""}, {"AX.", "quorum F--"}, {".XX", ""}, {"XXX", "end --- and ends"}}},
    {"AnArrivalAfterItIsRoundZeroOfAnotherOne",
     Quorum(1),
     {{"AAA", "first FFF"}, {"XXX", "end --- and ends"}, {"A..", ""}, {".AA", "first FFF"}, {"A..", "quorum F--"}}},
    {"JoinedRanksNeedNotRetireIt", Quorum(1), {{"AAA", "first FFF"}, {"XXJ", "end --- and ends"}}},
    {"NotWhenAllHaveJoined", Quorum(1), {{"AAA", "first FFF"}, {"JJJ", ""}}},
    {"ARankThatNeverUsedItNeedNotRetireIt", Quorum(1), {{"AAJ", "first FF-"}, {"XX.", "end --- and ends"}}},
    {"InAFlush", Quorum(1), {{"AAA", "first FFF"}, {"FFF", "flush ---"}, {"XXX", "end --- and ends"}, {"FFF", ""}}},
    {"NobodyIsAwaitedInAFlushAfterIt",
     Quorum(1),
     {{"AAA", "first FFF"}, {"XXX", "end --- and ends"}, {"F..", ""}, {"FFF", ""}}},
};
INSTANTIATE_TEST_SUITE_P(Ends, RuleTest, testing::ValuesIn(kEnds), kNameOfCase);

INSTANTIATE_TEST_SUITE_P(Flush, RuleTest, testing::ValuesIn(kFlush), kNameOfCase);

INSTANTIATE_TEST_SUITE_P(Scheduled, RuleTest, testing::ValuesIn(kScheduled), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(ReadyRanks, RuleTest, testing::ValuesIn(kReadyRanks), kNameOfCase);

// --- Groups by a schedule

TEST(ScheduledRoundTest, CarriesItsGroups) {
  Puppets puppets(4, Pairs());
  puppets.Cycle("AAAA");
  EXPECT_THAT(puppets.last[0].groups, IsEmpty()) << "round 0 is of all";
  const Partition neighbours = {0, 0, 1, 1}, others = {0, 1, 0, 1};
  for (Round round = 1; round < 6; ++round) {
    puppets.Cycle(round == 3 ? "AAAA" : "A...");
    EXPECT_EQ(puppets.last[0].round, round);
    EXPECT_EQ(puppets.last[0].groups, round % 2 == 1 ? others : neighbours) << round;
  }
}

TEST(ScheduledRoundTest, RoundZeroAnnouncesWhatComes) {
  Puppets puppets(4, Pairs());
  puppets.Cycle("AAAA");
  EXPECT_THAT(puppets.last[0].upcoming, ElementsAre(Partition{0, 1, 0, 1}, Partition{0, 0, 1, 1}));
  puppets.Cycle("AAAA");
  EXPECT_THAT(puppets.last[0].upcoming, IsEmpty());
}

TEST(ScheduledRoundTest, RoundZeroDoesNotAnnounceALongTable) {
  Policy policy = Quorum(1);
  policy.schedule.kind = Schedule::Kind::kTable;
  for (int i = 0; i < 1000; ++i) policy.schedule.table.push_back({0, i % 2});
  Puppets puppets(2, policy);
  puppets.Cycle("AA");
  EXPECT_EQ(puppets.last[0].upcoming.size(), 64u);
  EXPECT_EQ(puppets.last[0].upcoming[0], (Partition{0, 1})) << "of round 1";
}

TEST(ScheduledRoundTest, AFullRoundIsOfAllTogether) {
  Puppets puppets(4, Pairs(3));
  puppets.Cycle("AAAA");
  puppets.Cycle("AAAA");
  EXPECT_EQ(puppets.last[0].groups, (Partition{0, 1, 0, 1})) << "everybody is there, but it is no full round";
  puppets.Cycle("AAAA");
  EXPECT_THAT(puppets.last[0].groups, IsEmpty());
  puppets.Cycle("AAAA");
  EXPECT_EQ(puppets.last[0].groups, (Partition{0, 1, 0, 1})) << "round 3";
}

TEST(ScheduledRoundTest, SoIsOneByLiveness) {
  Puppets puppets(4, Pairs(2));
  puppets.Cycle("AAAA");
  EXPECT_EQ(puppets.Cycle("Akkk"), "liveness Fppp");
  EXPECT_THAT(puppets.last[0].groups, IsEmpty());
}

TEST(ScheduledRoundTest, LivenessKeepsTheGroupsOfOthers) {
  Puppets puppets(4, Pairs(0, 2));
  puppets.Cycle("AAAA");
  EXPECT_EQ(puppets.Cycle("AkkB"), "liveness Fpp-");
  EXPECT_EQ(puppets.last[0].groups, (Partition{0, 1, 0, 1}));
}

TEST(ScheduledRoundTest, OnlyTheFirstUseOfAKeptModelIsFresh) {
  Puppets puppets(4, Pairs());
  puppets.Cycle("AAAA");
  puppets.Cycle("AKP.");
  const auto& contributions = puppets.last[0].contributions;
  EXPECT_FALSE(contributions[0].stale);
  EXPECT_TRUE(contributions[1].stale);
  EXPECT_FALSE(contributions[2].stale);
  EXPECT_FALSE(contributions[1].fresh);
  EXPECT_FALSE(contributions[2].fresh);
}

TEST(ScheduledRoundTest, AFlushIsNoRound) {
  for (const Policy& policy : {Pairs(), Pairs(2), Ready(2)}) {
    Puppets puppets(4, policy);
    puppets.Cycle("AAAA");
    for (int flush = 0; flush < 3; ++flush) {
      ASSERT_EQ(puppets.Cycle("FFFF"), "flush ----");
      EXPECT_THAT(puppets.last[0].groups, Each(kNoGroup));
      EXPECT_THAT(puppets.last[0].members(0), IsEmpty());
    }
    puppets.Cycle("AAAA");
    EXPECT_EQ(puppets.last[0].round, 1) << "the next one";
  }
}

TEST(ScheduledRoundTest, TheWorkOfArrivalsIsPassedOn) {
  Coordinator coordinator(2);
  for (const Rank rank : {0, 1}) {
    Report report;
    Report::Item item;
    item.bucket = "a";
    item.gradients = 1;
    item.work = 10 + rank;
    item.declaration = Declaration{Quorum(2)};
    report.items.push_back(item);
    coordinator.Observe(rank, report, Time(0));
  }
  const auto closings = coordinator.Decide(Time(0));
  ASSERT_EQ(closings.size(), 1u);
  EXPECT_EQ(closings[0].contributions[0].work, 10);
  EXPECT_EQ(closings[0].contributions[1].work, 11);
}

// --- Groups of ready ranks

class ReadyRoundTest : public testing::Test {
 protected:
  // Four ranks, of which 0 and 1 have formed a group; each has arrived every 10 ms.
  void StartWithAPair(Puppets& puppets) {
    puppets.Cycle("AAAA");
    puppets.now = 10ms;
    ASSERT_EQ(puppets.Cycle("AA.."), "quorum FF--");
    puppets.now = 20ms;
  }
};

TEST_F(ReadyRoundTest, TellsTheGroupsApart) {
  Puppets puppets(5, Ready(2));
  puppets.Cycle("AAAAA");
  ASSERT_EQ(puppets.Cycle("AAAA."), "quorum FFFF-");
  ASSERT_EQ(puppets.last.size(), 1u);
  const auto groups = GroupsOf(puppets.last[0].groups);
  ASSERT_EQ(groups.size(), 2u);
  for (const Members& group : groups) EXPECT_EQ(group.size(), 2u);
  EXPECT_EQ(puppets.last[0].groups[4], kNoGroup);
}

TEST_F(ReadyRoundTest, WhoIsLeftOverIsTheNextOnesFirst) {
  Puppets puppets(5, Ready(2));
  puppets.Cycle("AAAAA");
  puppets.now = 1ms;
  EXPECT_EQ(puppets.Cycle("..A.."), "");
  puppets.now = 2ms;
  EXPECT_EQ(puppets.Cycle("AA..."), "quorum F-F--");
  puppets.now = 3ms;
  EXPECT_EQ(puppets.Cycle("...A."), "quorum -F-F-");
}

TEST_F(ReadyRoundTest, AFullRoundHasNoGroups) {
  Puppets puppets(3, Ready(2));
  puppets.Cycle("AAA");
  EXPECT_THAT(puppets.last[0].groups, IsEmpty());
  EXPECT_EQ(puppets.Cycle("CAA"), "everybody FFF");
  EXPECT_THAT(puppets.last[0].groups, IsEmpty());
}

TEST_F(ReadyRoundTest, AGroupOfAllRanksIsOne) {
  Puppets puppets(3, Ready(9));
  puppets.Cycle("AAA");
  EXPECT_EQ(puppets.Cycle("AA."), "");
  EXPECT_EQ(puppets.Cycle("..A"), "quorum FFF");
  EXPECT_EQ(puppets.last[0].groups, (Partition{0, 0, 0}));
}

TEST_F(ReadyRoundTest, IsAskedForAgainWhileOneRuns) {
  Puppets puppets(4, Ready(2));
  puppets.Cycle("AAAA");
  EXPECT_EQ(puppets.Cycle("AARR"), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), Time::min());
}

TEST_F(ReadyRoundTest, AHoldEndsByItself) {
  Puppets puppets(4, Ready(2));
  StartWithAPair(puppets);
  EXPECT_EQ(puppets.Cycle("AA.."), "") << "the same two again";
  EXPECT_EQ(puppets.coordinator.NextDeadline(), 30ms) << "as long as their last step";
  puppets.now = 29ms;
  EXPECT_EQ(puppets.Cycle("...."), "");
  puppets.now = 30ms;
  EXPECT_EQ(puppets.Cycle("...."), "quorum FF--");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), kNever);
}

TEST_F(ReadyRoundTest, AHoldEndsWithARankOfAnotherPart) {
  Puppets puppets(4, Ready(2));
  StartWithAPair(puppets);
  puppets.Cycle("AA..");
  puppets.now = 21ms;
  EXPECT_EQ(puppets.Cycle("..A."), "quorum F-F-");
}

TEST_F(ReadyRoundTest, AHoldIsOverWhenNobodyElseCanCome) {
  Puppets puppets(4, Ready(2));
  StartWithAPair(puppets);
  EXPECT_EQ(puppets.Cycle("AAWW"), "liveness FF--");
  EXPECT_EQ(puppets.Cycle("...."), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), kNever) << "nothing is held any more";
}

TEST_F(ReadyRoundTest, AHoldIsOverWhenAFullRoundIsAskedFor) {
  Puppets puppets(4, Ready(2));
  StartWithAPair(puppets);
  EXPECT_EQ(puppets.Cycle("AA.."), "");
  EXPECT_EQ(puppets.Cycle("..C."), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), kNever) << "it waits for rank 3, and for no time";
}

TEST_F(ReadyRoundTest, NoGroupIsLargerThanAsked) {
  Puppets puppets(4, Ready(2));
  StartWithAPair(puppets);
  ASSERT_EQ(puppets.Cycle(".AA."), "quorum -FF-");
  puppets.now = 30ms;
  puppets.Cycle("AAAW");  // held for rank 3, which cannot come
  ASSERT_EQ(puppets.last.size(), 1u);
  EXPECT_GE(puppets.last[0].fresh(), 2);
  for (const Members& group : GroupsOf(puppets.last[0].groups)) EXPECT_LE(group.size(), 2u);
}

TEST_F(ReadyRoundTest, WindowsThatDidNotConnectAllAreCounted) {
  Puppets puppets(4, Ready(2, 2));
  puppets.Cycle("AAAA");
  puppets.now = 10ms;
  EXPECT_EQ(puppets.Cycle("AA.."), "quorum FF--");
  puppets.now = 20ms;
  EXPECT_EQ(puppets.Cycle("AA.."), "");
  puppets.now = 30ms;
  EXPECT_EQ(puppets.Cycle("...."), "quorum FF--");
  EXPECT_EQ(puppets.Cycle("AA.."), "quorum FF--") << "they have waited in vain";
  const auto unconnected = puppets.coordinator.UnconnectedWindows();
  EXPECT_EQ(unconnected.size(), 1u);
  EXPECT_EQ(unconnected.at("a"), 2) << "from the second group on the window is full";
}

TEST_F(ReadyRoundTest, RanksThatAreOutOfTrainingNeedNotBeConnected) {
  Puppets puppets(4, Ready(2));
  StartWithAPair(puppets);
  EXPECT_EQ(puppets.Cycle("AAFF"), "quorum FF--");
  puppets.now = 30ms;
  EXPECT_EQ(puppets.Cycle("AAJJ"), "quorum FF--");
}

TEST_F(ReadyRoundTest, OffsetsCountFromTheFirstOfThoseThatWait) {
  Puppets puppets(3, Ready(2));
  puppets.Cycle("AAA");
  puppets.now = 1s;
  puppets.Cycle("A..");
  puppets.now = 3s;
  EXPECT_EQ(puppets.Cycle(".A."), "quorum FF-");
  const auto offsets = puppets.coordinator.ArrivalOffsets().at("a");
  EXPECT_THAT(offsets.total_seconds, ElementsAre(0, 2, 0));
  EXPECT_THAT(offsets.count, ElementsAre(2, 2, 1));
}

// --- The random initiator

TEST(InitiatorRuleTest, OnlyTheDrawnRankClosesTheRound) {
  const Policy policy = RandomInitiator(7);
  Puppets puppets(3, policy);
  ASSERT_EQ(puppets.Cycle("AAA"), "first FFF");
  for (Round round = 1; round < 20; ++round) {
    const auto drawn = static_cast<std::size_t>(Initiator(policy, round, 3));
    std::string others = "AAA", alone = "...", closed = "quorum FFF";
    others[drawn] = '.';
    alone[drawn] = 'A';
    others[(drawn + 1) % 3] = '.';  // else everybody would be there
    closed[7 + (drawn + 1) % 3] = '-';
    EXPECT_EQ(puppets.Cycle(others), "") << round;
    EXPECT_EQ(puppets.Cycle(alone), closed) << round;
  }
}

TEST(InitiatorRuleTest, TheNextActiveRankStandsInForAJoinedOne) {
  const Policy policy = RandomInitiator(7);
  Puppets puppets(4, policy);
  ASSERT_EQ(puppets.Cycle("AAAA"), "first FFFF");
  const auto drawn = static_cast<std::size_t>(Initiator(policy, 1, 4));
  std::string row = "....", closed = "quorum ----";
  row[drawn] = row[(drawn + 1) % 4] = 'J';
  row[(drawn + 3) % 4] = 'A';
  EXPECT_EQ(puppets.Cycle(row), "");
  row[(drawn + 3) % 4] = '.';
  row[(drawn + 2) % 4] = 'A';
  closed[7 + (drawn + 2) % 4] = closed[7 + (drawn + 3) % 4] = 'F';
  // Both active ranks are there now, which is everybody.
  closed.replace(0, 6, "everybody");
  EXPECT_EQ(puppets.Cycle(row), closed);
}

TEST(InitiatorRuleTest, NobodyElseStandsIn) {
  const Policy policy = RandomInitiator(7);
  Puppets puppets(4, policy);
  ASSERT_EQ(puppets.Cycle("AAAA"), "first FFFF");
  const auto drawn = static_cast<std::size_t>(Initiator(policy, 1, 4));
  std::string row = "....", closed = "quorum ----";
  row[drawn] = 'J';
  row[(drawn + 2) % 4] = 'A';
  EXPECT_EQ(puppets.Cycle(row), "");
  row[(drawn + 2) % 4] = '.';
  row[(drawn + 1) % 4] = 'A';
  closed[7 + (drawn + 1) % 4] = closed[7 + (drawn + 2) % 4] = 'F';
  EXPECT_EQ(puppets.Cycle(row), closed);
}

TEST(InitiatorRuleTest, LivenessHelpsWhenTheDrawnRankIsBlocked) {
  const Policy policy = RandomInitiator(7);
  Puppets puppets(3, policy);
  ASSERT_EQ(puppets.Cycle("AAA"), "first FFF");
  const auto drawn = static_cast<std::size_t>(Initiator(policy, 1, 3));
  std::string row = "BBB", closed = "liveness ---";
  row[(drawn + 1) % 3] = 'A';
  closed[9 + (drawn + 1) % 3] = 'F';
  EXPECT_EQ(puppets.Cycle(row), closed);
}

// --- Several buckets

TEST(SeveralBucketsTest, CloseInTheOrderOfTheirNames) {
  Puppets puppets(2, Quorum(1));
  EXPECT_EQ(puppets.Cycle({{"c", "AA"}, {"a", "AA"}, {"b", "AA"}}), "a first FF, b first FF, c first FF");
  EXPECT_EQ(puppets.Cycle({{"c", "A."}, {"a", "PA"}, {"b", ".."}}), "a quorum pF, c quorum F-");
}

TEST(SeveralBucketsTest, RoundsAreCountedForEach) {
  Puppets puppets(2, Quorum(1));
  puppets.Cycle({{"a", "AA"}, {"b", "AA"}});
  puppets.Cycle({{"a", "A."}, {"b", ".."}});
  puppets.Cycle({{"a", "A."}, {"b", "A."}});
  ASSERT_EQ(puppets.last.size(), 2u);
  EXPECT_EQ(puppets.last[0].round, 2);
  EXPECT_EQ(puppets.last[1].round, 1);
}

TEST(SeveralBucketsTest, LivenessIsLookedAtOnlyWhenNothingElseCloses) {
  Puppets puppets(3, Quorum(2));
  puppets.Cycle({{"a", "AAA"}, {"b", "AAA"}});
  EXPECT_EQ(puppets.Cycle({{"a", "A.."}, {"b", ".A."}}), "");
  // Rank 2's arrival closes b in the cycle in which a could close by liveness, had nothing else closed.
  EXPECT_EQ(puppets.Cycle({{"a", "BBB"}, {"b", "..A"}}), "b quorum -FF");
  EXPECT_EQ(puppets.Cycle({{"a", "BBB"}, {"b", "..."}}), "a liveness F--");
}

TEST(SeveralBucketsTest, LivenessClosesOneAtATime) {
  Puppets puppets(3, Quorum(3));
  puppets.Cycle({{"a", "AAA"}, {"b", "AAA"}});
  EXPECT_EQ(puppets.Cycle({{"a", "A.."}, {"b", ".A."}}), "");
  EXPECT_EQ(puppets.Cycle({{"a", "BBB"}, {"b", "..."}}), "a liveness F--");
  EXPECT_EQ(puppets.Cycle({{"a", ".BB"}, {"b", "..."}}), "") << "rank 0 has its result, and may come to b";
  EXPECT_EQ(puppets.Cycle({{"a", "BBB"}, {"b", "..."}}), "b liveness -F-");
}

// A rank that waits says nothing new when the round that it waits for is closed beside another one, so nobody would ask
// for the cycle in which the second round is looked at.
TEST(SeveralBucketsTest, AnotherCycleIsAskedForWhileLivenessIsDue) {
  Puppets puppets(3, Quorum(2));
  puppets.Cycle({{"a", "AAA"}, {"b", "AAA"}});
  EXPECT_EQ(puppets.Cycle({{"a", "A.."}, {"b", ".A."}}), "");
  EXPECT_EQ(puppets.Cycle({{"a", "WWA"}, {"b", "..."}}), "a quorum F-F");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), kNever) << "rank 2 has not said that it waits";
  EXPECT_EQ(puppets.Cycle({{"a", "A.W"}, {"b", "..."}}), "");
  EXPECT_EQ(puppets.Cycle({{"a", "WAW"}, {"b", "..."}}), "a quorum FF-");
  EXPECT_LE(puppets.coordinator.NextDeadline(), puppets.now) << "nobody who is missing in b can come";
  EXPECT_EQ(puppets.Cycle({{"a", "WWW"}, {"b", "..."}}), "b liveness -F-");
}

TEST(SeveralBucketsTest, AnotherCycleIsAskedForAfterARoundByLiveness) {
  Puppets puppets(3, Quorum(3));
  puppets.Cycle({{"a", "AAA"}, {"b", "AAA"}});
  EXPECT_EQ(puppets.Cycle({{"a", "A.."}, {"b", ".A."}}), "");
  EXPECT_EQ(puppets.Cycle({{"a", "WWB"}, {"b", "..."}}), "a liveness F--");
  EXPECT_LE(puppets.coordinator.NextDeadline(), puppets.now);
}

TEST(SeveralBucketsTest, AFlushClosesAll) {
  Puppets puppets(2, Quorum(1));
  puppets.Cycle({{"a", "AA"}, {"b", "AA"}});
  EXPECT_EQ(puppets.Cycle({{"a", "fF"}, {"b", "FF"}}), "a flush p-, b flush --");
}

TEST(SeveralBucketsTest, AFlushSkipsBucketsWithoutARound) {
  Puppets puppets(2, Quorum(1));
  puppets.Cycle({{"a", "AA"}, {"b", ".."}});
  EXPECT_EQ(puppets.Cycle({{"a", "FF"}, {"b", "PF"}}), "a flush --");
}

// Two threads of a rank have a bucket each; one of them waits, or is out of training.
TEST(SeveralBucketsTest, ARankMayComeToOneBucketAndNotToAnother) {
  const auto decide = [](const BucketSet& absent, const BucketSet& waiting) {
    Puppets puppets(2, Quorum(2));
    puppets.Cycle({{"a", "AA"}, {"b", "AA"}});
    puppets.Cycle({{"a", "A."}, {"b", "A."}});
    Report report;
    report.absent = absent;
    report.waiting = waiting;
    puppets.coordinator.Observe(0, {}, Time(0));
    puppets.coordinator.Observe(1, report, Time(0));
    std::string closed;
    for (const Closing& closing : puppets.coordinator.Decide(Time(0))) closed += closing.bucket;
    return closed;
  };
  EXPECT_EQ(decide({}, {}), "");
  EXPECT_EQ(decide({}, {false, {"a"}}), "a");
  EXPECT_EQ(decide({}, {false, {"b"}}), "b");
  EXPECT_EQ(decide({false, {"b"}}, {}), "b");
  EXPECT_EQ(decide({}, {true, {}}), "a") << "one at a time";
}

// Other threads than those that flush have arrived: no flush takes their rounds, and it is over with them.
TEST(SeveralBucketsTest, AFlushWaitsForTheRoundsOfWhatHasArrived) {
  Puppets puppets(2, Quorum(2));
  puppets.Cycle({{"a", "AA"}, {"b", "AA"}, {"c", "AA"}});
  EXPECT_EQ(puppets.Cycle({{"a", "A."}, {"b", "A."}, {"c", ".."}}), "");
  EXPECT_EQ(puppets.Cycle({{"a", "FF"}, {"b", "FF"}, {"c", "FF"}}), "a liveness F-, c flush --");
  EXPECT_TRUE(puppets.last[0].flushes);
  EXPECT_TRUE(puppets.last[1].flushes);
  for (const Closing& closing : puppets.last) EXPECT_EQ(closing.flush_over, Report::Flush::kNone);
  EXPECT_LE(puppets.coordinator.NextDeadline(), puppets.now);
  EXPECT_EQ(puppets.Cycle({{"a", "FF"}, {"b", "FF"}, {"c", "FF"}}), "b liveness F-");
  EXPECT_EQ(puppets.last[0].flush_over, Report::Flush::kFlushing);
}

// Its thread goes on arriving at one bucket: what is pending in the others is delivered all the same.
TEST(SeveralBucketsTest, AFlushIsNotStarvedByArrivals) {
  Puppets puppets(2, Quorum(1));
  puppets.Cycle({{"a", "AA"}, {"b", "AA"}});
  const auto flush = [&] {
    for (Rank rank = 0; rank < 2; ++rank) {
      Report report;
      report.flush = Report::Flush::kFlushing;
      report.absent.names = {"b"};
      Report::Item item;
      item.bucket = rank == 0 ? "a" : "b";
      item.kind = rank == 0 ? Report::Item::Kind::kArrival : Report::Item::Kind::kPending;
      item.gradients = item.late = 1;
      report.items.push_back(item);
      puppets.coordinator.Observe(rank, report, Time(0));
    }
    return puppets.coordinator.Decide(Time(0));
  };
  const auto closings = flush();
  ASSERT_EQ(closings.size(), 2u);
  EXPECT_EQ(closings[0].reason, Closing::Reason::kQuorum);
  EXPECT_TRUE(closings[0].flushes) << "the first one since the flush began";
  EXPECT_EQ(closings[1].reason, Closing::Reason::kFlush);
  EXPECT_EQ(closings[1].gradients(), 1);
  EXPECT_EQ(closings[1].flush_over, Report::Flush::kFlushing);
}

TEST(SeveralBucketsTest, AFlushAfterOneThatWasGivenUpBeginsAnew) {
  Puppets puppets(2, Quorum(2));
  puppets.Cycle({{"a", "AA"}, {"b", "AA"}});
  EXPECT_EQ(puppets.Cycle({{"a", "FF"}, {"b", "FR"}}), "a flush --");
  EXPECT_EQ(puppets.Cycle({{"a", "F."}, {"b", "FR"}}), "");
  EXPECT_EQ(puppets.Cycle({{"a", "FF"}, {"b", "FF"}}), "a flush --, b flush --");
  EXPECT_EQ(puppets.last[1].flush_over, Report::Flush::kFlushing);
}

// --- Ranks that have ended, and others that never will

class AbandonTest : public testing::Test {
 protected:
  // Round 0, then rank 0 ends while the others do what `letters` says.
  explicit AbandonTest() { puppets_.Cycle("AAA"); }
  std::string After(Time time, const std::string& letters) {
    puppets_.now = time;
    return puppets_.Cycle(letters);
  }
  Puppets puppets_{3, Quorum(2)};
  static constexpr Time kPatience = Coordinator::kAbandonAfter;
};

TEST_F(AbandonTest, EndedRanksLeaveWhenAllOthersAreBlockedForLong) {
  EXPECT_EQ(After(1s, "EBB"), "");
  EXPECT_EQ(puppets_.coordinator.NextDeadline(), 1s + kPatience);
  EXPECT_EQ(After(1s + kPatience - 1ns, "EBB"), "");
  EXPECT_EQ(After(1s + kPatience, "EBB"), "end ---");
}

TEST_F(AbandonTest, ARankThatComputesStartsThePatienceAnew) {
  EXPECT_EQ(After(1s, "EBB"), "");
  EXPECT_EQ(After(5s, "EB."), "");
  EXPECT_EQ(After(6s, "EBB"), "");
  EXPECT_EQ(After(5s + kPatience, "EBB"), "");
  EXPECT_EQ(After(6s + kPatience, "EBB"), "end ---");
}

TEST_F(AbandonTest, NobodyLeavesWhileARankFlushes) {
  EXPECT_EQ(After(1s, "EBF"), "");
  EXPECT_EQ(After(1s + kPatience, "EBF"), "");
}

TEST_F(AbandonTest, NobodyLeavesBeforeARankHasEnded) {
  EXPECT_EQ(After(1s, "BBB"), "");
  EXPECT_EQ(After(1s + kPatience, "BBB"), "");
}

// --- Ranks that wait for each other

class DeadlockTest : public testing::Test {
 protected:
  DeadlockTest() { puppets_.coordinator.SetDeadlockAfter(kPatience); }
  std::string After(Time time, const std::map<std::string, std::string>& letters) {
    puppets_.now = time;
    return puppets_.Cycle(letters);
  }
  Puppets puppets_{3, Quorum(2)};
  static constexpr Time kPatience = Coordinator::kDeadlockAfter;
};

TEST_F(DeadlockTest, RoundsZeroOfDifferentBucketsFail) {
  puppets_.Cycle({{"a", "A.A"}, {"b", ".A."}});
  const std::map<std::string, std::string> waits = {{"a", "W.W"}, {"b", ".W."}};
  EXPECT_EQ(After(1s, waits), "");
  EXPECT_EQ(puppets_.coordinator.NextDeadline(), 1s + kPatience);
  EXPECT_EQ(After(1s + kPatience - 1ns, waits), "");
  EXPECT_EQ(After(1s + kPatience, waits), "a liveness F-F, b liveness -F-");
  for (const Closing& closing : puppets_.last) {
    EXPECT_THAT(closing.error, HasSubstr("ranks 0 2 wait in round 0 of a (Quorum(2))"));
    EXPECT_THAT(closing.error, HasSubstr("rank 1 waits in round 0 of b (Quorum(2))"));
  }
}

// Each rank waits in a round 0 of a process set that another rank is in, and that waits in yet another one.
TEST_F(DeadlockTest, WaitsInOtherProcessSetsFail) {
  const auto observe = [this](const std::string& elsewhere) {
    for (Rank rank = 0; rank < 3; ++rank) {
      Report report;
      report.waiting.all = report.blocked = true;
      report.elsewhere = rank == 1 ? elsewhere : "in round 0 of b";
      puppets_.coordinator.Observe(rank, report, puppets_.now);
    }
  };
  Coordinator& coordinator = puppets_.coordinator;
  observe("in a flush");
  EXPECT_THAT(coordinator.Decide(1s), IsEmpty());
  EXPECT_EQ(coordinator.NextDeadline(), 1s + kPatience);
  EXPECT_THAT(coordinator.Decide(1s + kPatience), IsEmpty()) << "this process set has no bucket";
  EXPECT_THAT(coordinator.deadlock(), HasSubstr("ranks 0 2 wait in round 0 of b of another process set"));
  EXPECT_THAT(coordinator.deadlock(), HasSubstr("rank 1 waits in a flush of another process set"));
  EXPECT_THAT(coordinator.Decide(2s + kPatience), IsEmpty());
  EXPECT_EQ(coordinator.deadlock(), "");
}

TEST_F(DeadlockTest, SaysWhatDiffersFirst) {
  const auto arrive = [this](Rank rank, const std::string& bucket, std::vector<std::string> members) {
    Report report;
    report.waiting.all = report.blocked = true;
    report.items.emplace_back().bucket = bucket;
    report.items.back().declaration = Declaration{Quorum(2)};
    report.items.back().declaration->members = std::move(members);
    puppets_.coordinator.Observe(rank, report, puppets_.now);
  };
  arrive(0, "a", {"1.weight (3, 4)", "1.bias (4)"});
  arrive(1, "b", {"1.weight (3, 5)", "1.bias (5)"});
  arrive(2, "a", {"1.weight (3, 4)", "1.bias (4)"});
  EXPECT_THAT(puppets_.coordinator.Decide(0s), IsEmpty());
  const std::vector<Closing> closings = puppets_.coordinator.Decide(kPatience);
  ASSERT_EQ(closings.size(), 2u);
  EXPECT_THAT(closings[0].error, HasSubstr("round 0 of a [1.weight (3, 4) and 1 more]"));
  EXPECT_THAT(closings[0].error, HasSubstr("rank 1 has 1.weight (3, 5) instead of 1.weight (3, 4) of rank 0"));
}

TEST_F(DeadlockTest, AFlushOfSomeRanksFailsWhereTheOthersAreBlocked) {
  puppets_.Cycle("AAA");
  EXPECT_EQ(After(1s, {{"a", "FBB"}}), "");
  EXPECT_EQ(After(1s + kPatience, {{"a", "FBB"}}), "liveness ---");
  EXPECT_THAT(puppets_.last[0].error, HasSubstr("rank 0 waits in a flush"));
  EXPECT_THAT(puppets_.last[0].error, HasSubstr("ranks 1 2 wait in a collective of Horovod's own"));
}

TEST_F(DeadlockTest, ARankThatComputesStartsThePatienceAnew) {
  puppets_.Cycle("AAA");
  EXPECT_EQ(After(1s, {{"a", "FBB"}}), "");
  EXPECT_EQ(After(5s, {{"a", "FB."}}), "");
  EXPECT_EQ(After(6s, {{"a", "FBB"}}), "");
  EXPECT_EQ(After(5s + kPatience, {{"a", "FBB"}}), "");
  EXPECT_EQ(After(6s + kPatience, {{"a", "FBB"}}), "liveness ---");
}

TEST_F(DeadlockTest, ARoundThatClosesStartsThePatienceAnew) {
  puppets_.Cycle({{"a", "AAA"}, {"b", "AAA"}});
  EXPECT_EQ(After(1s, {{"a", "FBW"}, {"b", "..A"}}), "b liveness --F");
  EXPECT_EQ(After(2s, {{"a", "FBB"}, {"b", "..."}}), "");
  EXPECT_EQ(After(1s + kPatience, {{"a", "FBB"}, {"b", "..."}}), "");
  EXPECT_EQ(After(2s + kPatience, {{"a", "FBB"}, {"b", "..."}}), "a liveness ---, b liveness ---");
}

TEST_F(DeadlockTest, NothingFailsWhereARoundIsStillReduced) {
  puppets_.Cycle("AAA");
  EXPECT_EQ(After(1s, {{"a", "FBB"}, {"b", "..."}}), "");
  EXPECT_EQ(After(1s + kPatience, {{"a", "FRB"}, {"b", ".B."}}), "");
}

TEST_F(DeadlockTest, JoinedRanksDoNotCount) {
  puppets_.Cycle("AAA");
  EXPECT_EQ(After(1s, {{"a", "FBJ"}}), "");
  EXPECT_EQ(After(1s + kPatience, {{"a", "FBJ"}}), "liveness ---");
}

TEST_F(DeadlockTest, HorovodsOwnCollectivesAreNotJudged) {
  puppets_.Cycle("AAA");
  EXPECT_EQ(After(1s, {{"a", "BBB"}}), "");
  EXPECT_EQ(After(1s + 2 * kPatience, {{"a", "BBB"}}), "");
}

TEST_F(DeadlockTest, RanksOutsideMayEndAWaitOfAPartOfTheJob) {
  puppets_.coordinator.SetDeadlockAfter(kNever);
  puppets_.Cycle("AAA");
  EXPECT_EQ(After(1s, {{"a", "FBB"}}), "");
  EXPECT_EQ(After(1s + 2 * kPatience, {{"a", "FBB"}}), "");
}

// --- Reductions that a device runs behind the cycles

TEST(DeviceTest, TheNextRoundWaitsUntilTheLastOneHasEndedEverywhere) {
  Puppets puppets(3, Quorum(1));
  puppets.Cycle("AAA");
  EXPECT_EQ(puppets.Cycle("ARR"), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), Time::min()) << "no news will announce the end";
  EXPECT_EQ(puppets.Cycle("..R"), "");
  EXPECT_EQ(puppets.Cycle("..."), "quorum F--");
}

TEST(DeviceTest, AFullRoundWaitsToo) {
  Puppets puppets(2, Quorum(2));
  puppets.Cycle("AA");
  EXPECT_EQ(puppets.Cycle("AR"), "");
  EXPECT_EQ(puppets.Cycle(".A"), "everybody FF");
}

TEST(DeviceTest, LivenessWaitsToo) {
  Puppets puppets(2, Quorum(2));
  puppets.Cycle({{"a", "AA"}, {"b", "AA"}});
  EXPECT_EQ(puppets.Cycle({{"a", "AR"}, {"b", ".W"}}), "");
  EXPECT_EQ(puppets.Cycle({{"a", ".."}, {"b", ".W"}}), "a liveness F-");
}

TEST(DeviceTest, AFlushWaitsToo) {
  Puppets puppets(2, Quorum(1));
  puppets.Cycle({{"a", "AA"}, {"b", "AA"}});
  EXPECT_EQ(puppets.Cycle({{"a", "FR"}, {"b", ".F"}}), "b flush --");
  EXPECT_EQ(puppets.last[0].flush_over, Report::Flush::kNone);
  EXPECT_EQ(puppets.coordinator.NextDeadline(), Time::min());
  EXPECT_EQ(puppets.Cycle({{"a", "FF"}, {"b", ".."}}), "a flush --");
  EXPECT_EQ(puppets.last[0].flush_over, Report::Flush::kFlushing);
}

// --- Grace periods

class GraceRuleTest : public testing::Test {
 protected:
  static Policy WithGrace(Time grace, int quorum = 1) {
    Policy policy = Quorum(quorum);
    policy.grace = grace;
    return policy;
  }
};

TEST_F(GraceRuleTest, HoldsASatisfiedRoundOpen) {
  Puppets puppets(3, WithGrace(10ms));
  puppets.Cycle("AAA");
  EXPECT_EQ(puppets.Cycle("A.."), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), 10ms);
  puppets.now = 9ms;
  EXPECT_EQ(puppets.Cycle(".A."), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), 10ms) << "a further arrival does not prolong it";
  puppets.now = 10ms;
  EXPECT_EQ(puppets.Cycle("..."), "quorum FF-");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), kNever);
}

TEST_F(GraceRuleTest, StartsWhenThePolicyIsSatisfied) {
  Puppets puppets(3, WithGrace(10ms, 2));
  puppets.Cycle("AAA");
  EXPECT_EQ(puppets.Cycle("A.."), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), kNever);
  puppets.now = 50ms;
  EXPECT_EQ(puppets.Cycle(".A."), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), 60ms);
}

TEST_F(GraceRuleTest, EndsWhenEverybodyIsThere) {
  Puppets puppets(3, WithGrace(10ms));
  puppets.Cycle("AAA");
  puppets.Cycle("A..");
  puppets.now = 1ms;
  EXPECT_EQ(puppets.Cycle(".AA"), "everybody FFF");
}

TEST_F(GraceRuleTest, StartsAnewWhenAStaleRankComesBackFromAnExemption) {
  Policy policy = WithGrace(10ms);
  policy.max_staleness = 0;
  Puppets puppets(3, policy);
  puppets.Cycle("AAA");
  EXPECT_EQ(puppets.Cycle("ABP"), "");  // satisfied: rank 1 is exempt, rank 2's pending sum counts
  EXPECT_EQ(puppets.coordinator.NextDeadline(), 10ms);
  puppets.now = 5ms;
  EXPECT_EQ(puppets.Cycle("..P"), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), kNever);
  puppets.now = 20ms;
  EXPECT_EQ(puppets.Cycle(".BP"), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), 30ms);
}

TEST_F(GraceRuleTest, GoesWithTheArrivalOfARankThatJoins) {
  Puppets puppets(2, WithGrace(10ms));
  puppets.Cycle("AA");
  EXPECT_EQ(puppets.Cycle("A."), "");
  ASSERT_EQ(puppets.coordinator.NextDeadline(), 10ms);
  EXPECT_EQ(puppets.Cycle("J."), "");
  EXPECT_EQ(puppets.coordinator.NextDeadline(), kNever) << "or every cycle negotiates as long as the join lasts";
}

TEST_F(GraceRuleTest, IsCutShortWhenNobodyElseCanCome) {
  Puppets puppets(3, WithGrace(10ms));
  puppets.Cycle("AAA");
  EXPECT_EQ(puppets.Cycle("ABB"), "liveness F--");
}

TEST_F(GraceRuleTest, TheAutomaticOneLearnsFromTheRanks) {
  Puppets puppets(2, WithGrace(Policy::kAutomaticGrace));
  puppets.Cycle("AA");
  // Steps of 100 ms in which rank 1 comes 2 ms after rank 0: at first rank 0's arrival closes the round, and rank 1 is
  // late, as its pending sum shows; then its lag is known, and the round waits.
  int closed_by_everybody = 0;
  bool late = false;
  for (int step = 1; step <= 20; ++step) {
    puppets.now = step * 100ms;
    const std::string closed = puppets.Cycle(late ? "AP" : "A.");
    puppets.now += 2ms;
    late = !closed.empty();
    if (puppets.Cycle(late ? ".P" : ".A") == "everybody FF") ++closed_by_everybody;
  }
  EXPECT_GE(closed_by_everybody, 17);
}

TEST_F(GraceRuleTest, TheAutomaticOneKnowsWhenARankCameThatReportsAfterTheReduction) {
  Puppets puppets(2, WithGrace(Policy::kAutomaticGrace));
  puppets.Cycle("AA");
  int closed_by_everybody = 0;
  bool late = false;
  for (int step = 1; step <= 20; ++step) {
    puppets.now = step * 100ms;
    late = !puppets.Cycle(late ? "AP" : "A.").empty();
    puppets.now += 2ms;
    if (!late && puppets.Cycle(".A") == "everybody FF") ++closed_by_everybody;
    puppets.now += 60ms;  // the reduction, in which no report travels
    puppets.age = 60ms;
    puppets.Cycle(late ? ".P" : "..");
  }
  EXPECT_GE(closed_by_everybody, 17);
}

TEST_F(GraceRuleTest, TheAutomaticOneDoesNotWaitForASlowRank) {
  Puppets puppets(2, WithGrace(Policy::kAutomaticGrace));
  puppets.Cycle("AA");
  for (int step = 1; step <= 20; ++step) {
    puppets.now = step * 100ms;
    EXPECT_EQ(puppets.Cycle(step == 1 ? "A." : "AP"), step == 1 ? "quorum F-" : "quorum Fp") << step;
    puppets.now += 50ms;
    puppets.Cycle(".P");
  }
}

// --- Ranks that disagree

void Declare(Coordinator& coordinator, Rank rank, const Declaration& declaration) {
  Report report;
  Report::Item item;
  item.bucket = "a";
  item.gradients = 1;
  item.declaration = declaration;
  report.items.push_back(item);
  coordinator.Observe(rank, report, Time(0));
}

TEST(DisagreementTest, NamesBothRanksAndBothPolicies) {
  Coordinator coordinator(3);
  Declare(coordinator, 0, {Quorum(1)});
  Declare(coordinator, 1, {Quorum(1)});
  Declare(coordinator, 2, {Quorum(2)});
  const std::vector<Closing> closings = coordinator.Decide(Time(0));
  ASSERT_EQ(closings.size(), 1u);
  EXPECT_EQ(closings[0].error,
            "Mismatched sync policies: rank 0 asked for Quorum(1), but rank 2 asked for Quorum(2). "
            "Use the same policy with the same settings on every rank.");
}

TEST(DisagreementTest, EverySettingCounts) {
  const Policy agreed = Quorum(1);
  const std::vector<Policy> others = test::Others(agreed);
  for (const Policy& other : others)
    EXPECT_THAT(Disagreement("rank 0", {agreed}, "rank 1", {other}), HasSubstr("rank 1")) << &other - others.data();
}

TEST(ReportTest, NumbersThatNoRankCanHaveAreRefused) {
  const auto observe = [](const auto& spoil) {
    Coordinator coordinator(2);
    Report report;
    report.items.resize(1);
    report.items[0].declaration = Declaration{Quorum(1)};
    spoil(report.items[0]);
    coordinator.Observe(1, report, Time(0));
  };
  observe([](Report::Item&) {});
  EXPECT_THROW(observe([](Report::Item& item) { item.gradients = -1; }), std::runtime_error);
  EXPECT_THROW(observe([](Report::Item& item) { item.late = -1; }), std::runtime_error);
  EXPECT_THROW(observe([](Report::Item& item) { item.age = Time(-1); }), std::runtime_error);
  EXPECT_THROW(observe([](Report::Item& item) { item.age = kNever; }), std::runtime_error);
  EXPECT_THROW(observe([](Report::Item& item) { item.declaration->policy.quorum = 0; }), std::runtime_error);
  EXPECT_THROW(observe([](Report::Item& item) {
                 item.declaration->policy.schedule.kind = Schedule::Kind::kTable;
                 item.declaration->policy.schedule.table = {{0, 7}};
               }),
               std::runtime_error);
}

TEST(DisagreementTest, WhatTravelsMustBeTheSame) {
  const Declaration agreed{Quorum(1), DataType::kFloat32, {2, 3}, Memory::kHost, 0.5, 2};
  std::vector<std::pair<Declaration, std::string>> others(5, {agreed, ""});
  others[0].first.type = DataType::kInt32;
  others[0].second =
      "Mismatched data types: One rank had type float32, but another rank had type int32. (rank 0 and rank 1)";
  others[1].first.shape = {3, 2};
  others[1].second =
      "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2, 3], but another rank sent a tensor of "
      "shape [3, 2]. (rank 0 and rank 1)";
  others[2].first.prescale_factor = 1;
  others[2].second =
      "Mismatched prescale and/or postscale factors: One rank sent factors (0.5, 2), but another rank sent factors "
      "(1, 2). (rank 0 and rank 1)";
  others[3].first.postscale_factor = 1;
  others[3].second =
      "Mismatched prescale and/or postscale factors: One rank sent factors (0.5, 2), but another rank sent factors "
      "(0.5, 1). (rank 0 and rank 1)";
  others[4].first.device = 0;
  others[4].second =
      "Mismatched ALLREDUCE CPU/GPU device selection: One rank specified device CPU, but another rank specified device "
      "GPU. (rank 0 and rank 1)";
  for (const auto& [other, error] : others) {
    Coordinator coordinator(2);
    Declare(coordinator, 0, agreed);
    Declare(coordinator, 1, other);
    EXPECT_EQ(coordinator.Decide(Time(0)).at(0).error, error);
  }
}

TEST(DeclarationTest, IsKeptForTheRowsOfLaterRounds) {
  Coordinator coordinator(3);
  coordinator.SetJoined({false, false, true});
  Declare(coordinator, 0, {Quorum(1), DataType::kFloat64, {4}, 2, 1, 0.25});
  Declare(coordinator, 1, {Quorum(1), DataType::kFloat64, {4}, 3, 1, 0.25});
  EXPECT_EQ(coordinator.Decide(Time(0)).at(0).error, "");
  EXPECT_EQ(coordinator.declaration("a").type, DataType::kFloat64);
  EXPECT_THAT(coordinator.declaration("a").shape, testing::ElementsAre(4));
  EXPECT_EQ(coordinator.declaration("a").postscale_factor, 0.25);
  EXPECT_EQ(coordinator.device("a", 0), 2);
  EXPECT_EQ(coordinator.device("a", 1), 3);
  EXPECT_EQ(coordinator.device("a", 2), 2) << "of a rank that has not said where its tensor lies";
}

TEST(JoinTest, WhatHadArrivedOfARankThatJoinsIsForgotten) {
  Puppets puppets(3, Quorum(2));
  puppets.Cycle("AAA");
  EXPECT_EQ(puppets.Cycle("..A"), "");
  EXPECT_EQ(puppets.Cycle(".AJ"), "") << "one arrival of two";
  EXPECT_EQ(puppets.coordinator.OldestWait(), puppets.now);
  EXPECT_EQ(puppets.Cycle("A.J"), "everybody FF-");
}

TEST(OldestWaitTest, AFlushCountsAndTheEndOfARankDoesNot) {
  Puppets puppets(3, Quorum(2));
  puppets.Cycle("AAA");
  puppets.Cycle("E..");
  EXPECT_EQ(puppets.coordinator.OldestWait(), kNever);
  puppets.Cycle("EF.");
  const Time began = puppets.now;
  puppets.now += std::chrono::seconds(1);
  puppets.Cycle("EF.");
  EXPECT_EQ(puppets.coordinator.OldestWait(), began);
  puppets.Cycle("E..");
  EXPECT_EQ(puppets.coordinator.OldestWait(), kNever) << "it has given its flush up";
}

TEST(DisagreementTest, ARankThatComesLaterIsHeldToWhatTheOthersSaid) {
  Coordinator coordinator(2);
  coordinator.SetJoined({false, true});
  Declare(coordinator, 0, {Quorum(1)});
  EXPECT_EQ(coordinator.Decide(Time(0)).at(0).error, "");
  coordinator.SetJoined({false, false});
  Declare(coordinator, 1, {Quorum(2)});
  EXPECT_EQ(coordinator.Decide(Time(0)).at(0).error,
            "Mismatched sync policies: rank 0 asked for Quorum(1), but rank 1 asked for Quorum(2). "
            "Use the same policy with the same settings on every rank.");
}

TEST(DisagreementTest, ARoundZeroThatNobodyElseWillJoinIsAnError) {
  Puppets puppets(2, Quorum(1));
  puppets.Cycle("AE");
  ASSERT_EQ(puppets.last.size(), 1u);
  EXPECT_THAT(puppets.last[0].error, HasSubstr("No rank that is missing will ever use this bucket"));
}

TEST(ForgetTest, TheBucketIsAsIfItHadNeverBeenUsed) {
  Coordinator coordinator(2);
  Declare(coordinator, 0, {Quorum(1)});
  Declare(coordinator, 1, {Quorum(2)});
  coordinator.Decide(Time(0));
  coordinator.Forget("a");
  EXPECT_THAT(coordinator.Decide(Time(0)), IsEmpty());
  Declare(coordinator, 0, {Quorum(2)});
  EXPECT_THAT(coordinator.Decide(Time(0)), IsEmpty()) << "round 0 is full again";
  Declare(coordinator, 1, {Quorum(2)});
  const std::vector<Closing> closings = coordinator.Decide(Time(0));
  ASSERT_EQ(closings.size(), 1u);
  EXPECT_EQ(closings[0].round, 0);
  EXPECT_EQ(closings[0].reason, Closing::Reason::kFirst);
  EXPECT_EQ(closings[0].error, "");
}

// --- What it tells people

TEST(DescribeWaitsTest, NamesTheRanksThatAreMissing) {
  Puppets puppets(4, Quorum(4));
  puppets.now = 5s;
  puppets.Cycle({{"b", "A.AJ"}, {"a", ".A.J"}});
  EXPECT_EQ(puppets.coordinator.DescribeWaits(5s), "round 0 of a waits for ranks 0 2\nround 0 of b waits for ranks 1");
}

TEST(DescribeWaitsTest, IsSilentAboutYoungRoundsAndRoundsWithoutAnArrival) {
  Puppets puppets(2, Quorum(2));
  puppets.Cycle("AA");
  EXPECT_EQ(puppets.coordinator.DescribeWaits(1h), "");
  puppets.now = 5s;
  puppets.Cycle("A.");
  EXPECT_EQ(puppets.coordinator.DescribeWaits(4999ms), "");
  EXPECT_EQ(puppets.coordinator.DescribeWaits(5s), "round 1 of a waits for ranks 1");
}

TEST(DescribeWaitsTest, NamesTheRanksThatAFlushWaitsFor) {
  Puppets puppets(4, Quorum(2));
  puppets.Cycle("AAAA");
  puppets.now = 5s;
  puppets.Cycle("F.EJ");
  EXPECT_EQ(puppets.coordinator.DescribeWaits(4999ms), "");
  EXPECT_EQ(puppets.coordinator.DescribeWaits(5s), "a flush, or the end of the job, waits for ranks 1");
}

TEST(ArrivalOffsetsTest, TellHowFarBehindTheFirstEachRankArrives) {
  Puppets puppets(3, Quorum(2));
  puppets.Cycle("A..");
  puppets.now = 100ms;
  puppets.Cycle(".A.");
  puppets.now = 300ms;
  EXPECT_EQ(puppets.Cycle("..A"), "first FFF");
  const auto offsets = puppets.coordinator.ArrivalOffsets().at("a");
  EXPECT_THAT(offsets.total_seconds, ElementsAre(0, testing::DoubleEq(0.1), testing::DoubleEq(0.3)));
  EXPECT_THAT(offsets.count, ElementsAre(1, 1, 1));
}

TEST(ArrivalOffsetsTest, LateArrivalsCountFromTheRoundThatTheyMissed) {
  Puppets puppets(2, Quorum(1));
  puppets.Cycle("AA");
  puppets.now = 1s;
  EXPECT_EQ(puppets.Cycle("A."), "quorum F-");
  puppets.now = 3s;
  puppets.Cycle(".P");
  puppets.now = 4s;
  puppets.Cycle(".P");  // the same one
  const auto offsets = puppets.coordinator.ArrivalOffsets().at("a");
  EXPECT_THAT(offsets.total_seconds, ElementsAre(0, 2));
  EXPECT_THAT(offsets.count, ElementsAre(2, 2));
}

// --- An adaptive quorum; test_auto_quorum.cc says what it does

Policy Auto() {
  Policy policy = Quorum(1);
  policy.rule = Policy::Rule::kAuto;
  policy.description = "Auto()";
  return policy;
}

TEST(CoordinatorTest, AnAdaptiveQuorumBeginsWithAllRanks) {
  Puppets puppets(3, Auto());
  EXPECT_EQ(puppets.Cycle("AAA"), "first FFF");
  EXPECT_EQ(puppets.last[0].quorum, 3);
  EXPECT_EQ(puppets.Cycle("AA."), "");
  EXPECT_EQ(puppets.Cycle("..A"), "everybody FFF");
  EXPECT_EQ(puppets.Cycle("AAF"), "liveness FF-") << "as with any quorum";
}

TEST(CoordinatorTest, ABucketOfAnAdaptiveQuorumEndsAndMayBeginAnew) {
  Puppets puppets(3, Auto());
  EXPECT_EQ(puppets.Cycle({{"a", "AAA"}, {"b", "AAA"}}), "a first FFF, b first FFF");
  EXPECT_EQ(puppets.Cycle({{"a", "..."}, {"b", "XXX"}}), "b end --- and ends") << "which was the one that is followed";
  EXPECT_EQ(puppets.Cycle({{"a", "AAA"}}), "everybody FFF");
  EXPECT_EQ(puppets.Cycle({{"a", "XXX"}}), "end --- and ends");
  EXPECT_EQ(puppets.Cycle({{"a", "AAA"}}), "first FFF");
  EXPECT_EQ(puppets.last[0].quorum, 3);
}

// --- Work sharing

class SharingTest : public testing::Test {
 protected:
  static constexpr int kEach = 2;

  struct Said {
    int made = 0;  // micro-batches, of which the coordinator has not heard
    std::optional<Share> share = std::nullopt;
    bool leaves = false;
    bool blocked = false;
    Report::Backlog backlog = Report::Backlog::kNone;
    int each = kEach;
  };
  void Say(Rank rank, const Said& said) {
    Report report;
    report.leaves = said.leaves;
    report.blocked = report.waiting.all = said.blocked;
    Report::Item& item = report.items.emplace_back();
    item.bucket = "a";
    item.kind = said.made > 0 ? Report::Item::Kind::kArrival : Report::Item::Kind::kPending;
    item.gradients = said.made;
    item.share = said.share;
    item.backlog = said.backlog;
    if (!begun_) {
      Declaration& declaration = item.declaration.emplace();
      declaration.policy.rule = Policy::Rule::kWorkSharing;
      declaration.policy.micro_batches = kRanks * said.each;
      declaration.policy.grants = true;
      declaration.policy.max_staleness = 1000;
      declaration.policy.description = "WorkSharing(), passes=" + std::to_string(said.each);
    }
    coordinator_.Observe(rank, report, now_);
  }
  std::vector<Closing> Decide() { return coordinator_.Decide(now_); }
  void BeginTraining() {
    for (Rank rank = 0; rank < kRanks; ++rank) Say(rank, {kEach});
    ASSERT_EQ(Decide().size(), 1u);
    begun_ = true;
  }

  static constexpr int kRanks = 2;
  Coordinator coordinator_{kRanks};
  bool begun_ = false;
  Time now_{1h};
};

TEST_F(SharingTest, TheFirstUpdateHasThePartOfEachRank) {
  Say(0, {kEach});
  Say(1, {1});
  EXPECT_THAT(Decide(), IsEmpty()) << "all ranks have arrived, but not with all";
  Say(1, {kEach});
  const auto closings = Decide();
  ASSERT_EQ(closings.size(), 1u);
  EXPECT_EQ(closings[0].reason, Closing::Reason::kFirst);
  EXPECT_EQ(closings[0].gradients(), kRanks * kEach);
}

TEST_F(SharingTest, AnUpdateClosesWhenAllMicroBatchesAreThere) {
  BeginTraining();
  Say(0, {1, Share{2, 2}});
  Say(1, {0, Share{1, 1}});
  EXPECT_THAT(Decide(), IsEmpty());
  Say(0, {3, Share{3, 3}});
  Say(1, {0, Share{1, 1}});
  EXPECT_THAT(Decide(), IsEmpty()) << "rank 1 is in the middle of one";
  Say(0, {0, Share{3, 3, true}, false, true});
  Say(1, {1, Share{1, 1}});
  const auto closings = Decide();
  ASSERT_EQ(closings.size(), 1u);
  EXPECT_EQ(closings[0].reason, Closing::Reason::kQuorum);
  EXPECT_EQ(closings[0].contributions[0].gradients, 3);
  EXPECT_EQ(closings[0].contributions[1].gradients, 1);
}

TEST_F(SharingTest, WhoWaitsDoesNotCloseAnUpdate) {
  BeginTraining();
  Say(0, {1, Share{1, 1, true}, false, true});
  Say(1, {1, Share{1, 1, true}, false, true});
  EXPECT_THAT(Decide(), IsEmpty());
  EXPECT_EQ(coordinator_.grants(), (std::vector<Grants>{{"a", {{0, 1}, {2, 3}}}}));
}

TEST_F(SharingTest, AnUpdateIsShortWhereNobodyComes) {
  BeginTraining();
  Say(0, {1, Share{1, 1}, true});
  Say(1, {0, Share{1, 0}});
  EXPECT_THAT(Decide(), IsEmpty());
  Say(0, {0, Share{1, 1}, true});
  Say(1, {0, Share{1, 0}, true});
  const auto closings = Decide();
  ASSERT_EQ(closings.size(), 1u);
  EXPECT_EQ(closings[0].reason, Closing::Reason::kLiveness);
  EXPECT_EQ(closings[0].gradients(), 1);
}

TEST_F(SharingTest, AnUpdateWaitsForARankWithTooManyResults) {
  BeginTraining();
  Say(0, {kRanks * kEach, Share{4, 4}});
  Say(1, {0, Share{0, 0}, false, false, Report::Backlog::kFull});
  EXPECT_THAT(Decide(), IsEmpty());
  Say(0, {0, Share{4, 4}});
  Say(1, {0, Share{0, 0}});
  EXPECT_EQ(Decide().size(), 1u);
}

TEST_F(SharingTest, RanksThatDisagreeAreToldAtOnce) {
  Say(0, {1});
  Say(1, {1, std::nullopt, false, false, Report::Backlog::kNone, kEach + 1});
  const auto closings = Decide();
  ASSERT_EQ(closings.size(), 1u);
  EXPECT_THAT(closings[0].error, HasSubstr("passes=3"));
}

// Rank 0 has begun a micro-batch, and waits in a collective of Horovod's own, to which rank 1 does not come before the
// update is complete.
TEST_F(SharingTest, ACollectiveWithinAnUpdateIsTold) {
  coordinator_.SetDeadlockAfter(Coordinator::kDeadlockAfter);
  BeginTraining();
  const auto say = [&](int made) {
    Say(0, {0, Share{1, 1}, false, true});
    Say(1, {made, Share{3, 3, true}, false, true});
  };
  say(3);
  EXPECT_THAT(Decide(), IsEmpty());
  now_ += Coordinator::kDeadlockAfter;
  say(0);
  const auto closings = Decide();
  ASSERT_EQ(closings.size(), 1u);
  EXPECT_THAT(closings[0].error, HasSubstr("rank 0 waits in a collective of Horovod's own"));
  EXPECT_THAT(closings[0].error, HasSubstr("in a round hook of the optimizer"));
}

}  // namespace
}  // namespace horovod_partial
