#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "core/rounds/coordinator.h"
#include "harness/others.h"
#include "harness/policies.h"
#include "harness/puppets.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
using test::LettersOf;
using test::Pairs;
using test::Puppets;
using test::Quorum;
using test::RandomInitiator;
using test::Ready;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// --- Rules, one cycle after the other, the first one after round 0

constexpr Time kSame{-1};                 // the time of the cycle before
constexpr Time kAny{-2};                  // is not looked at
constexpr Time kNextCycle = Time::min();  // the coordinator asks for the next cycle

struct Step {
  std::string says;
  std::string closes;
  Time at = kSame;
  Time deadline = kAny;  // when the coordinator asks for a cycle, although no rank has news
};

struct Case {
  std::string name;
  Policy policy;
  std::vector<Step> cycles;
  Time deadlock_after = kNever;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

// Round 0 of all ranks, in the buckets that the next cycle names.
Step RoundZeroBefore(const Step& next) {
  const auto letters = LettersOf(next.says);
  Step step;
  for (const auto& [bucket, row] : letters) {
    step.says += bucket + ":" + std::string(row.size(), 'A') + " ";
    step.closes += (step.closes.empty() ? "" : ", ") + (letters.size() > 1 ? bucket + " " : "");
    step.closes += "first " + std::string(row.size(), 'F');
  }
  return step;
}

class RoundZeroTest : public testing::TestWithParam<Case> {
 protected:
  static void Play(const std::vector<Step>& cycles) {
    const Case& c = GetParam();
    Puppets puppets(static_cast<int>(LettersOf(cycles[0].says).begin()->second.size()), c.policy);
    puppets.coordinator.SetDeadlockAfter(c.deadlock_after);
    for (std::size_t i = 0; i < cycles.size(); ++i) {
      const auto& [says, closes, at, deadline] = cycles[i];
      if (at != kSame) puppets.now = at;
      EXPECT_EQ(puppets.Cycle(says), closes) << "cycle " << i << ": " << says;
      if (deadline == kAny) continue;
      EXPECT_EQ(puppets.coordinator.NextDeadline(), deadline) << "cycle " << i << ": " << says;
    }
  }
};

TEST_P(RoundZeroTest, Decides) { Play(GetParam().cycles); }

class RuleTest : public RoundZeroTest {};

TEST_P(RuleTest, Decides) {
  std::vector<Step> cycles = GetParam().cycles;
  cycles.insert(cycles.begin(), RoundZeroBefore(cycles[0]));
  Play(cycles);
}

const Case kQuorum[] = {
    {"OfOne", Quorum(1), {{".A.", "quorum -F-"}, {"..A", "quorum --F"}}},
    {"OfTwo", Quorum(2), {{"A..", ""}, {"...", ""}, {".A.", "quorum FF-"}}},
    {"OfThreeIsEverybody", Quorum(3), {{"AA.", ""}, {"..A", "everybody FFF"}}},
    {"EverybodyAtOnce", Quorum(1), {{"AAA", "everybody FFF"}}},
    {"BeyondTheSizeIsEverybody", Quorum(9), {{"AA.", ""}, {"..A", "everybody FFF"}}},
    {"OfTheActiveRanksOnly", Quorum(3), {{"A.J", ""}, {".AJ", "everybody FF-"}}},
    {"PendingIsNoArrival", Quorum(2), {{"APP", ""}, {".AP", "quorum FFp"}}},
    {"NothingClosesWithoutAnArrival", Quorum(1), {{"PPP", ""}, {"BBB", ""}, {"bbb", ""}}},
    {"PendingTravelsWithTheRound", Quorum(1), {{"AP.", "quorum Fp-"}, {"A..", "quorum F--"}}},
    {"AnArrivalThatOnlyDeliversCounts", Quorum(2), {{"AD.", "quorum FF-"}}},
};

const Case kStaleness[] = {
    {"ZeroIsEverybody", Quorum(1, 0), {{"AA.", ""}, {"..A", "everybody FFF"}}},
    {"OneRoundMayBeMissed", Quorum(1, 1), {{"AA.", "quorum FF-"}, {"AA.", ""}, {"..A", "everybody FFF"}}},
    {"PendingCountsAsContributing", Quorum(1, 1), {{"AA.", "quorum FF-"}, {"AA.", ""}, {"..P", "quorum FFp"}}},
    {"PendingStartsTheCountAnew", Quorum(1, 1), {{"AAP", "quorum FFp"}, {"AA.", "quorum FF-"}, {"AA.", ""}}},
    {"DeliveringNothingDoesNot", Quorum(1, 1), {{"AAD", "everybody FFF"}, {"AA.", ""}}},
    {"JoinedRanksAreExempt", Quorum(1, 0), {{"A.J", ""}, {".AJ", "everybody FF-"}}},
    {"BlockedRanksAreExempt", Quorum(1, 0), {{"AAB", "quorum FF-"}, {"AAB", "quorum FF-"}, {"AA.", ""}}},
    {"WaitingRanksAreNot", Quorum(1, 0), {{"AAW", "liveness FF-"}, {"AA.", ""}}},
    {"FlushingRanksAreExempt", Quorum(1, 0), {{"AAF", "quorum FF-"}, {"AAE", "quorum FF-"}}},
    {"ComesBeforeTheQuorum", Quorum(2, 1), {{"AA.", "quorum FF-"}, {"AA.", ""}, {"..B", "quorum FF-"}}},
    {"IsCountedForEachRank",
     Quorum(1, 2),
     {{"A..", "quorum F--"}, {".A.", "quorum -F-"}, {"A..", ""}, {"..A", "quorum F-F"}}},
};

const Case kFullRounds[] = {
    {"WaitForEverybody", Quorum(1), {{"C..", ""}, {".A.", ""}, {"..A", "everybody FFF"}}},
    {"WhoeverAsks", Quorum(1), {{".C.", ""}, {"A.A", "everybody FFF"}}},
    {"ForOneRoundOnly", Quorum(1), {{"CAA", "everybody FFF"}, {"A..", "quorum F--"}}},
    {"WithoutJoinedRanks", Quorum(1), {{"C.J", ""}, {".AJ", "everybody FF-"}}},
    {"GiveWayToLiveness", Quorum(1), {{"CB.", ""}, {".BB", "liveness F--"}}},
};

const Case kLiveness[] = {
    {"WhenAllOthersAreBlocked", Quorum(2), {{"A..", ""}, {".B.", ""}, {".BB", "liveness F--"}}},
    {"WhenAllOthersWait", Quorum(2), {{"AW.", ""}, {".WW", "liveness F--"}}},
    {"WhenAllOthersHaveJoined", Quorum(3), {{"A.J", ""}, {".BJ", "liveness F--"}}},
    {"WhenAllOthersFlushOrEnd", Quorum(2), {{"A..", ""}, {".FE", "liveness F--"}}},
    {"TakesWhatTheyHavePending", Quorum(2), {{"A..", ""}, {".bf", "liveness Fpp"}}},
    {"OverridesStaleness", Quorum(3, 0), {{"ABB", "liveness F--"}, {"ABB", "liveness F--"}}},
    {"NotWhileARankComputes", Quorum(2), {{"AB.", ""}, {".B.", ""}}},
    {"BlockedIsALevel", Quorum(2), {{"AB.", ""}, {"..B", ""}, {".BB", "liveness F--"}}},
    {"NeedsAnArrival", Quorum(2), {{"BBB", ""}, {"FBB", ""}}},
};

const Case kFlush[] = {
    {"WhenAllFlush", Quorum(2), {{"FF.", ""}, {"FFF", "flush ---"}}},
    {"DeliversWhatIsPending", Quorum(2), {{"fFf", "flush p-p"}}},
    {"TheEndIsOneToo", Quorum(2), {{"EEe", "end --p"}}},
    {"SomeEndOthersFlush", Quorum(2), {{"EFE", "flush ---"}, {"EEE", "end ---"}}},
    {"JoinedRanksNeedNotCome", Quorum(2), {{"FJJ", "flush ---"}}},
    {"WhatHasArrivedGoesFirst", Quorum(2), {{"A..", ""}, {"FFF", "liveness F--"}, {"FFF", "flush ---"}}},
    {"NotWhenEverybodyHasJoined", Quorum(2), {{"JJJ", ""}}},
};

// The groups are those of a butterfly: neighbours in even rounds, and 0 with 2 and 1 with 3 in odd ones. Round 0, full
// rounds and rounds by liveness that stand for full ones have none.
const Case kScheduled[] = {
    {"KeptModelsStandIn", Pairs(), {{"AKKK", "quorum Fkkk 0101"}, {"KAKK", "quorum kFkk 0011"}}},
    {"NobodyWaits", Pairs(), {{"AKK.", "quorum Fkk- 0101"}}},
    {"FullRoundsWaitForAll",
     Pairs(2),
     {{"AAAK", ""},
      {"...A", "everybody FFFF"},
      {"A...", "quorum F--- 0011"},
      {".A..", ""},
      {"A.AA", "everybody FFFF"}}},
    {"OtherRoundsHaveGroupsAlsoIfEverybodyIsThere",
     Pairs(3),
     {{"AAAA", "everybody FFFF 0101"}, {"AAAA", "everybody FFFF"}, {"AAAA", "everybody FFFF 0101"}}},
    {"FullRoundsCountJoinedRanksOut", Pairs(2), {{"AA.J", ""}, {"..AJ", "everybody FFF-"}}},
    {"FullRoundsGiveWayToLiveness", Pairs(2), {{"AkB.", ""}, {".kBW", "liveness Fk--"}}},
    {"LivenessKeepsTheGroupsOfOtherRounds", Pairs(0, 2), {{"AkkB", "liveness Fkk- 0101"}}},
    {"AKeptModelIsNoNews",
     Pairs(0, 1, 1),
     {{"AAAK", "quorum FFFk 0101"}, {"AAAK", ""}, {"...K", ""}, {"...A", "everybody FFFF 0011"}}},
    {"ALateArrivalIs",
     Pairs(0, 1, 1),
     {{"AAAK", "quorum FFFk 0101"}, {"AAAP", "quorum FFFp 0011"}, {"AAAK", "quorum FFFk 0101"}, {"AAAK", ""}}},
    {"AModelThatIsTooOldIsLeftOut",
     Pairs(0, 1, 1),
     {{"AAAk", "quorum FFFk 0101"}, {"AAAk", "quorum FFF- 0011"}, {"AAAb", "quorum FFFp 0101"}}},
    {"AFlushIsNoRound",
     Pairs(),
     {{"FFFF", "flush ---- ----"},
      {"ffff", "flush ---- ----"},
      {"FFFF", "flush ---- ----"},
      {"AAAA", "everybody FFFF 0101"}}},
    {"AnEndIsNoRoundEither", Pairs(2), {{"EEEE", "end ---- ----"}}},
};

// Rank 0 and rank 1 have formed a group, and each rank has arrived every 10 ms. So they are held, until the time that
// their last step took, for a rank of another part.
std::vector<Step> AfterAPair(const std::vector<Step>& steps) {
  std::vector<Step> all = {{"AA..", "quorum FF-- 00--", 10ms}};
  all.insert(all.end(), steps.begin(), steps.end());
  return all;
}

const Case kReadyRanks[] = {
    {"FirstComeFirstServed", Ready(2), {{"...A", ""}, {".A..", "quorum -F-F -0-0"}}},
    {"SeveralGroupsInOneRound", Ready(2), {{"AAAA.", "quorum FFFF- 0011-"}}},
    {"LessThanAGroupWaits", Ready(3), {{"AA..", ""}, {"....", ""}, {"..A.", "quorum FFF- 000-"}}},
    {"WhoIsLeftOverIsTheNextOnesFirst",
     Ready(2),
     {{"..A..", "", 1ms}, {"AA...", "quorum F-F-- 0-0--", 2ms}, {"...A.", "quorum -F-F- -0-0-", 3ms}}},
    {"AGroupOfAllRanksIsOne", Ready(9), {{"AA.", ""}, {"..A", "quorum FFF 000"}}},
    {"AFullArrivalWaitsForAll",
     Ready(2),
     {{"C...", ""}, {".AA.", ""}, {"...A", "everybody FFFF"}, {"AA..", "quorum FF-- 00--"}}},
    {"WhenFewerAreLeft",
     Ready(3),
     {{"A..E", ""}, {".A.E", ""}, {"..EE", "liveness FF-- 00--"}, {"A.EE", ""}, {".BEE", "liveness F--- 0---"}}},
    {"WhenOneIsLeft", Ready(2), {{"AFJ.", ""}, {".FJW", "liveness F--- 0---"}}},
    {"AFlushHasNoGroups",
     Ready(2),
     {{"FFFF", "flush ---- ----"}, {"EEEE", "end ---- ----"}, {"AA..", "quorum FF-- 00--"}}},
    {"WhatHasArrivedGoesBeforeAFlush",
     Ready(2),
     {{"A...", ""}, {"FFFF", "liveness F--- 0---"}, {"FFFF", "flush ---- ----"}}},
    {"TheLastRoundHasEndedEverywhere",
     Ready(2),
     {{"AARA", "", kSame, kNextCycle}, {"..R.", ""}, {"....", "quorum FF-- 00--"}}},
    {"AHoldEndsByItself", Ready(2),
     AfterAPair({{"AA..", "", 20ms, 30ms}, {"....", "", 29ms}, {"....", "quorum FF-- 00--", 30ms, kNever}})},
    {"AHoldEndsWithARankOfAnotherPart", Ready(2), AfterAPair({{"AA..", "", 20ms}, {"..A.", "quorum F-F- 0-0-", 21ms}})},
    {"AHoldIsOverWhenNobodyElseCanCome", Ready(2),
     AfterAPair({{"AAWW", "liveness FF-- 00--", 20ms}, {"....", "", kSame, kNever}})},
    // It waits for rank 3, and for no time.
    {"AHoldIsOverWhenAFullRoundIsAskedFor", Ready(2), AfterAPair({{"AA..", "", 20ms}, {"..C.", "", kSame, kNever}})},
    {"NoGroupIsLargerThanAsked", Ready(2),
     AfterAPair({{".AA.", "quorum -FF- -00-", 20ms}, {"AAAW", "liveness FFF- 001-", 30ms}})},
    {"RanksThatAreOutOfTrainingNeedNotBeConnected", Ready(2),
     AfterAPair({{"AAFF", "quorum FF-- 00--", 20ms}, {"AAJJ", "quorum FF-- 00--", 30ms}})},
};

// Of 3 ranks the initiators are 0, 0, 0 and 1, and of 4 ranks 0.
const Case kInitiator[] = {
    {"OnlyTheDrawnRankClosesTheRound",
     RandomInitiator(7),
     {{".A.", ""},
      {"A..", "quorum FF-"},
      {"..A", ""},
      {"A..", "quorum F-F"},
      {"A..", "quorum F--"},
      {"A..", ""},
      {".A.", "quorum FF-"}}},
    {"TheNextActiveRankStandsInForAJoinedOne", RandomInitiator(7), {{"J.A.", ""}, {"JA..", "quorum -FF-"}}},
    {"NobodyElseStandsIn", RandomInitiator(7), {{"JJ.A", ""}, {"JJA.", "everybody --FF"}}},
    {"LivenessHelpsWhenTheDrawnRankIsBlocked", RandomInitiator(7), {{"BAB", "liveness -F-"}}},
};

const Case kSeveralBuckets[] = {
    {"CloseInTheOrderOfTheirNames", Quorum(1), {{"c:A. a:PA b:..", "a quorum pF, c quorum F-"}}},
    // Rank 2's arrival closes b in the cycle in which a could close by liveness, had nothing else closed.
    {"LivenessIsLookedAtOnlyWhenNothingElseCloses",
     Quorum(2),
     {{"a:A.. b:.A.", ""}, {"a:BBB b:..A", "b quorum -FF"}, {"a:BBB b:...", "a liveness F--"}}},
    // Once rank 0 has its result, it may come to b.
    {"LivenessClosesOneAtATime",
     Quorum(3),
     {{"a:A.. b:.A.", ""},
      {"a:BBB b:...", "a liveness F--", kSame, kNextCycle},
      {"a:.BB b:...", ""},
      {"a:BBB b:...", "b liveness -F-"}}},
    // A rank that waits says nothing new when the round that it waits for is closed beside another one, so nobody would
    // ask for the cycle in which the second round is looked at.
    {"AnotherCycleIsAskedForWhileLivenessIsDue",
     Quorum(2),
     {{"a:A.. b:.A.", ""},
      {"a:WWA b:...", "a quorum F-F", kSame, kNever},
      {"a:A.W b:...", ""},
      {"a:WAW b:...", "a quorum FF-", kSame, kNextCycle},
      {"a:WWW b:...", "b liveness -F-"}}},
    {"AFlushClosesAll", Quorum(1), {{"a:fF b:FF", "a flush p- (of the flush), b flush -- (of the flush) (its end)"}}},
    // Other threads than those that flush have arrived: no flush takes their rounds, and it is over with them.
    {"AFlushWaitsForTheRoundsOfWhatHasArrived",
     Quorum(2),
     {{"a:A. b:A. c:..", ""},
      {"a:FF b:FF c:FF", "a liveness F- (of the flush), c flush -- (of the flush)", kSame, kNextCycle},
      {"a:FF b:FF c:FF", "b liveness F- (of the flush) (its end)"}}},
    {"AFlushAfterOneThatWasGivenUpBeginsAnew",
     Quorum(2),
     {{"a:FF b:FR", "a flush -- (of the flush)"},
      {"a:F. b:FR", ""},
      {"a:FF b:FF", "a flush -- (of the flush), b flush -- (of the flush) (its end)"}}},
};

// Ranks that have ended leave where all others are blocked for long.
constexpr Time kAbandons = Coordinator::kAbandonAfter;
const Case kAbandoned[] = {
    {"EndedRanksLeave",
     Quorum(2),
     {{"EBB", "", 1s, 1s + kAbandons}, {"EBB", "", 1s + kAbandons - 1ns}, {"EBB", "end ---", 1s + kAbandons}}},
    {"ARankThatComputesStartsThePatienceAnew",
     Quorum(2),
     {{"EBB", "", 1s},
      {"EB.", "", 5s},
      {"EBB", "", 6s},
      {"EBB", "", 5s + kAbandons},
      {"EBB", "end ---", 6s + kAbandons}}},
    {"NobodyLeavesWhileARankFlushes", Quorum(2), {{"EBF", "", 1s}, {"EBF", "", 1s + kAbandons}}},
    {"NobodyLeavesBeforeARankHasEnded", Quorum(2), {{"BBB", "", 1s}, {"BBB", "", 1s + kAbandons}}},
};

// Ranks that wait for each other fail.
constexpr Time kWaits = Coordinator::kDeadlockAfter;
const Case kDeadlock[] = {
    {"AFlushOfSomeRanksFailsWhereTheOthersAreBlocked",
     Quorum(2),
     {{"FBB", "", 1s}, {"FBB", "liveness ---", 1s + kWaits}},
     kWaits},
    {"ARankThatComputesStartsThePatienceAnew",
     Quorum(2),
     {{"FBB", "", 1s},
      {"FB.", "", 5s},
      {"FBB", "", 6s},
      {"FBB", "", 5s + kWaits},
      {"FBB", "liveness ---", 6s + kWaits}},
     kWaits},
    {"ARoundThatClosesStartsThePatienceAnew",
     Quorum(2),
     {{"a:FBW b:..A", "b liveness --F", 1s},
      {"a:FBB b:...", "", 2s},
      {"a:FBB b:...", "", 1s + kWaits},
      {"a:FBB b:...", "a liveness ---, b liveness ---", 2s + kWaits}},
     kWaits},
    {"JoinedRanksDoNotCount", Quorum(2), {{"FBJ", "", 1s}, {"FBJ", "liveness ---", 1s + kWaits}}, kWaits},
    {"HorovodsOwnCollectivesAreNotJudged", Quorum(2), {{"BBB", "", 1s}, {"BBB", "", 1s + 2 * kWaits}}, kWaits},
    {"RanksOutsideMayEndAWaitOfAPartOfTheJob", Quorum(2), {{"FBB", "", 1s}, {"FBB", "", 1s + 2 * kWaits}}},
};

// Reductions that a device runs behind the cycles. No news announces their end.
const Case kDevices[] = {
    {"TheNextRoundWaitsUntilTheLastOneHasEndedEverywhere",
     Quorum(1),
     {{"ARR", "", kSame, kNextCycle}, {"..R", ""}, {"...", "quorum F--"}}},
    {"AFullRoundWaitsToo", Quorum(2), {{"AR", ""}, {".A", "everybody FF"}}},
    {"LivenessWaitsToo", Quorum(2), {{"a:AR b:.W", ""}, {"a:.. b:.W", "a liveness F-"}}},
    {"AFlushWaitsToo",
     Quorum(1),
     {{"a:FR b:.F", "b flush -- (of the flush)", kSame, kNextCycle},
      {"a:FF b:..", "a flush -- (of the flush) (its end)"}}},
};

Policy WithGrace(Time grace, int quorum = 1, Round max_staleness = 16) {
  Policy policy = Quorum(quorum, max_staleness);
  policy.grace = grace;
  return policy;
}

const Case kGrace[] = {
    {"HoldsASatisfiedRoundOpen",
     WithGrace(10ms),
     {{"A..", "", 0ms, 10ms},
      {".A.", "", 9ms, 10ms},  // a further arrival does not prolong it
      {"...", "quorum FF-", 10ms, kNever}}},
    {"StartsWhenThePolicyIsSatisfied", WithGrace(10ms, 2), {{"A..", "", 0ms, kNever}, {".A.", "", 50ms, 60ms}}},
    {"EndsWhenEverybodyIsThere", WithGrace(10ms), {{"A..", ""}, {".AA", "everybody FFF", 1ms}}},
    // It is satisfied at first: rank 1 is exempt, and rank 2's pending sum counts.
    {"StartsAnewWhenAStaleRankComesBackFromAnExemption",
     WithGrace(10ms, 1, 0),
     {{"ABP", "", 0ms, 10ms}, {"..P", "", 5ms, kNever}, {".BP", "", 20ms, 30ms}}},
    // Or every cycle would negotiate for as long as the join lasts.
    {"GoesWithTheArrivalOfARankThatJoins", WithGrace(10ms), {{"A.", "", 0ms, 10ms}, {"J.", "", 0ms, kNever}}},
    {"IsCutShortWhenNobodyElseCanCome", WithGrace(10ms), {{"ABB", "liveness F--"}}},
};

const Case kEnds[] = {
    {"WhenAllHaveRetiredIt", Quorum(1), {{"XX.", ""}, {"XXX", "end --- --- and ends"}, {"...", ""}}},
    {"ByARoundIfSomethingIsPending", Quorum(1), {{"XxX", "end -p- and ends"}}},
    {"NotWhileARankArrives", Quorum(2), {{"X.A", ""}, {"XX.", "liveness --F"}}},
    {"NotWhileADeviceReduces", Quorum(1), {{"XXR", ""}, {"XXX", "end --- --- and ends"}}},
    {"AnArrivalUnretires",
     Quorum(1),
     {{"XX.", ""}, {"AX.", "quorum F--"}, {".XX", ""}, {"XXX", "end --- --- and ends"}}},
    {"AnArrivalAfterItIsRoundZeroOfAnotherOne",
     Quorum(1),
     {{"XXX", "end --- --- and ends"}, {"A..", ""}, {".AA", "first FFF"}, {"A..", "quorum F--"}}},
    {"JoinedRanksNeedNotRetireIt", Quorum(1), {{"XXJ", "end --- --- and ends"}}},
    {"NotWhenAllHaveJoined", Quorum(1), {{"JJJ", ""}}},
    {"InAFlush", Quorum(1), {{"FFF", "flush ---"}, {"XXX", "end --- --- and ends"}, {"FFF", ""}}},
    {"NobodyIsAwaitedInAFlushAfterIt", Quorum(1), {{"XXX", "end --- --- and ends"}, {"F..", ""}, {"FFF", ""}}},
};
// Round 0 itself, and what follows one that is not of all ranks and buckets.
const Case kRoundZero[] = {
    {"IsFull", Quorum(1), {{"A..", ""}, {".A.", ""}, {"..A", "first FFF"}}},
    {"WaitsForBlockedRanks", Quorum(1), {{"AB.", ""}, {".BB", ""}, {".AA", "first FFF"}}},
    {"CountsJoinedRanksOut", Quorum(3), {{"A.J", ""}, {".AJ", "first FF-"}}},
    {"OfOneRank", Quorum(1), {{"A", "first F"}, {"A", "everybody F"}}},
    {"MayBeAnArrivalThatOnlyDelivers", Quorum(1), {{"AAD", "first FFF"}}},
    {"DoesNotCloseByLivenessForParkedRanks", Quorum(1), {{"ABB", ""}, {".BB", ""}}},
    {"FailsWhenTheOthersAreGone", Quorum(1), {{"A..", ""}, {".F.", ""}, {".FE", "liveness F--"}}},
    {"DoesNotCloseByAFlush", Quorum(2), {{"FFF", ""}, {"EEE", ""}}},
    {"IsFullForReadyRanks", Ready(2), {{"AA..", ""}, {"..A.", ""}, {"...A", "first FFFF"}}},
    {"AFlushSkipsBucketsWithoutARound",
     Quorum(1),
     {{"a:AA b:..", "a first FF"}, {"a:FF b:PF", "a flush -- (of the flush) (its end)"}}},
    {"NothingFailsWhereARoundIsStillReduced",
     Quorum(2),
     {{"AAA", "first FFF"}, {"a:FBB b:...", "", 1s}, {"a:FRB b:.B.", "", 1s + kWaits}},
     kWaits},
    {"ARetiredRankIsExempt",
     Quorum(1, 2),
     {{"AAX", ""},
      {"..A", "first FFF"},
      {"A.X", "quorum F--"},
      {"A.X", "quorum F--"},
      {"A.X", ""},
      {".AX", "quorum FF-"}}},
    {"ARankThatNeverUsedItNeedNotRetireIt", Quorum(1), {{"AAJ", "first FF-"}, {"XX.", "end --- --- and ends"}}},
};

const auto kNameOfCase = [](const testing::TestParamInfo<Case>& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(RoundZero, RoundZeroTest, testing::ValuesIn(kRoundZero), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Quorum, RuleTest, testing::ValuesIn(kQuorum), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Staleness, RuleTest, testing::ValuesIn(kStaleness), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(FullRound, RuleTest, testing::ValuesIn(kFullRounds), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Liveness, RuleTest, testing::ValuesIn(kLiveness), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Ends, RuleTest, testing::ValuesIn(kEnds), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Flush, RuleTest, testing::ValuesIn(kFlush), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Scheduled, RuleTest, testing::ValuesIn(kScheduled), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(ReadyRanks, RuleTest, testing::ValuesIn(kReadyRanks), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Initiator, RuleTest, testing::ValuesIn(kInitiator), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(SeveralBuckets, RuleTest, testing::ValuesIn(kSeveralBuckets), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Abandoned, RuleTest, testing::ValuesIn(kAbandoned), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Deadlock, RuleTest, testing::ValuesIn(kDeadlock), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Devices, RuleTest, testing::ValuesIn(kDevices), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Grace, RuleTest, testing::ValuesIn(kGrace), kNameOfCase);

// A rank's first arrival at a bucket, with nothing else.
void Declare(Coordinator& coordinator, Rank rank, const Declaration& declaration, int work = 0) {
  Report report;
  Report::Item& item = report.items.emplace_back();
  item.bucket = "a";
  item.gradients = 1;
  item.work = work;
  item.declaration = declaration;
  coordinator.Observe(rank, report, Time(0));
}

// --- Groups by a schedule

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

TEST(ScheduledRoundTest, TheWorkOfArrivalsIsPassedOn) {
  Coordinator coordinator(2);
  for (const Rank rank : {0, 1}) Declare(coordinator, rank, {Quorum(2)}, 10 + rank);
  const auto closings = coordinator.Decide(Time(0));
  ASSERT_EQ(closings.size(), 1u);
  EXPECT_EQ(closings[0].contributions[0].work, 10);
  EXPECT_EQ(closings[0].contributions[1].work, 11);
}

// --- Groups of ready ranks

TEST(ReadyRoundTest, WindowsThatDidNotConnectAllAreCounted) {
  Puppets puppets(4, Ready(2, 2));
  puppets.Cycle("AAAA");
  puppets.now = 10ms;
  EXPECT_EQ(puppets.Cycle("AA.."), "quorum FF-- 00--");
  puppets.now = 20ms;
  EXPECT_EQ(puppets.Cycle("AA.."), "");
  puppets.now = 30ms;
  EXPECT_EQ(puppets.Cycle("...."), "quorum FF-- 00--");
  EXPECT_EQ(puppets.Cycle("AA.."), "quorum FF-- 00--") << "they have waited in vain";
  const auto counted = puppets.coordinator.Counted();
  EXPECT_EQ(counted.size(), 1u);
  EXPECT_EQ(counted.at("a").unconnected, 2) << "from the second group on the window is full";
}

TEST(ReadyRoundTest, OffsetsCountFromTheFirstOfThoseThatWait) {
  Puppets puppets(3, Ready(2));
  puppets.Cycle("AAA");
  puppets.now = 1s;
  puppets.Cycle("A..");
  puppets.now = 3s;
  EXPECT_EQ(puppets.Cycle(".A."), "quorum FF- 00-");
  EXPECT_THAT(puppets.coordinator.Counted().at("a").offsets, ElementsAre(0, 1, 0));
}

// --- Several buckets

TEST(SeveralBucketsTest, RoundsAreCountedForEach) {
  Puppets puppets(2, Quorum(1));
  puppets.Cycle("a:AA b:AA");
  puppets.Cycle("a:A. b:..");
  puppets.Cycle("a:A. b:A.");
  ASSERT_EQ(puppets.last.size(), 2u);
  EXPECT_EQ(puppets.last[0].round, 2);
  EXPECT_EQ(puppets.last[1].round, 1);
}

// Two threads of a rank have a bucket each; one of them waits, or is out of training.
TEST(SeveralBucketsTest, ARankMayComeToOneBucketAndNotToAnother) {
  const auto decide = [](const BucketSet& absent, const BucketSet& waiting) {
    Puppets puppets(2, Quorum(2));
    puppets.Cycle("a:AA b:AA");
    puppets.Cycle("a:A. b:A.");
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

// Its thread goes on arriving at one bucket: what is pending in the others is delivered all the same.
TEST(SeveralBucketsTest, AFlushIsNotStarvedByArrivals) {
  Puppets puppets(2, Quorum(1));
  puppets.Cycle("a:AA b:AA");
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

// --- Ranks that wait for each other

class DeadlockTest : public testing::Test {
 protected:
  DeadlockTest() { puppets_.coordinator.SetDeadlockAfter(kPatience); }
  Puppets puppets_{3, Quorum(2)};
  static constexpr Time kPatience = Coordinator::kDeadlockAfter;
};

TEST_F(DeadlockTest, RoundsZeroOfDifferentBucketsFail) {
  puppets_.Cycle("a:A.A b:.A.");
  puppets_.now = 1s;
  EXPECT_EQ(puppets_.Cycle("a:W.W b:.W."), "");
  EXPECT_EQ(puppets_.coordinator.NextDeadline(), 1s + kPatience);
  puppets_.now = 1s + kPatience - 1ns;
  EXPECT_EQ(puppets_.Cycle("a:W.W b:.W."), "");
  puppets_.now = 1s + kPatience;
  EXPECT_EQ(puppets_.Cycle("a:W.W b:.W."), "a liveness F-F, b liveness -F-");
  for (const Closing& closing : puppets_.last) {
    EXPECT_THAT(closing.error, HasSubstr("ranks 0 2 wait in round 0 of a (Quorum(2))"));
    EXPECT_THAT(closing.error, HasSubstr("rank 1 waits in round 0 of b (Quorum(2))"));
  }
}

TEST_F(DeadlockTest, SaysThatRanksFlushOrAreBlocked) {
  puppets_.Cycle("AAA");
  puppets_.Cycle("FBB");
  puppets_.now = kPatience;
  puppets_.Cycle("FBB");
  EXPECT_THAT(puppets_.last[0].error, HasSubstr("rank 0 waits in a flush"));
  EXPECT_THAT(puppets_.last[0].error, HasSubstr("ranks 1 2 wait in a collective of Horovod's own"));
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

// --- The grace period that follows the ranks

// Steps of 100 ms in which rank 1 comes 2 ms after rank 0. At first rank 0's arrival closes the round, and rank 1 is
// late, as its pending sum shows. Then its lag is known, and the round waits.
TEST(AutomaticGraceTest, LearnsFromTheRanks) {
  for (const Time reduction : {0ms, 60ms}) {  // during a reduction no report travels
    Puppets puppets(2, WithGrace(Policy::kAutomaticGrace));
    puppets.Cycle("AA");
    int closed_by_everybody = 0;
    bool late = false;
    for (int step = 1; step <= 20; ++step) {
      puppets.now = step * 100ms;
      late = !puppets.Cycle(late ? "AP" : "A.").empty();
      puppets.now += 2ms;
      if (!late && puppets.Cycle(".A") == "everybody FF") ++closed_by_everybody;
      puppets.now += reduction;
      puppets.age = reduction;
      puppets.Cycle(late ? ".P" : "..");
    }
    EXPECT_GE(closed_by_everybody, 17) << reduction.count();
  }
}

TEST(AutomaticGraceTest, DoesNotWaitForASlowRank) {
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

TEST(DescribeWaitsTest, NamesTheRanksThatAreMissingInOldWaits) {
  const std::string kEnd = "a flush, or the end of the job, waits for ranks 1";
  const std::string kRetired = "a, which other ranks use no more, waits for ranks 2";
  struct {
    std::vector<std::string> cycles;  // the last one at 5 s
    std::string waits;
    std::string unexplained;  // the waits that heartbeats do not see
  } const cases[] = {
      {{"b:A.AJ a:.A.J"}, "round 0 of a waits for ranks 0 2\nround 0 of b waits for ranks 1", ""},
      {{"AAAA"}, "", ""},
      {{"AAAA", "A..A"}, "round 1 of a waits for ranks 1 2", ""},
      {{"AAAA", "F.EJ"}, "a flush, or the end of the job, waits for ranks 1", ""},
      {{"AAAA", "E.EJ"}, kEnd, kEnd},
      {{"AAAA", "XX.X"}, kRetired, kRetired},
  };
  for (const auto& [cycles, waits, unexplained] : cases) {
    Puppets puppets(4, Quorum(4));
    for (const std::string& says : cycles) {
      puppets.now = &says == &cycles.back() ? 5s : 0s;
      puppets.Cycle(says);
    }
    EXPECT_EQ(puppets.coordinator.DescribeWaits(4999ms, false), "");
    EXPECT_EQ(puppets.coordinator.DescribeWaits(5s, false), waits);
    EXPECT_EQ(puppets.coordinator.DescribeWaits(4999ms, true), "");
    EXPECT_EQ(puppets.coordinator.DescribeWaits(5s, true), unexplained);
  }
}

TEST(ArrivalOffsetsTest, TellHowFarBehindTheFirstEachRankArrives) {
  Puppets puppets(3, Quorum(2));
  puppets.Cycle("A..");
  puppets.now = 100ms;
  puppets.Cycle(".A.");
  puppets.now = 300ms;
  EXPECT_EQ(puppets.Cycle("..A"), "first FFF");
  const auto counted = puppets.coordinator.Counted().at("a");
  EXPECT_THAT(counted.offsets, ElementsAre(0, testing::DoubleEq(0.1), testing::DoubleEq(0.3)));
  EXPECT_EQ(counted.unconnected, std::nullopt);
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
  EXPECT_THAT(puppets.coordinator.Counted().at("a").offsets, ElementsAre(0, 1));
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
  // The only closing of a cycle.
  Closing DecideOne() {
    const auto closings = Decide();
    EXPECT_EQ(closings.size(), 1u);
    return closings.at(0);
  }
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
  const Closing closing = DecideOne();
  EXPECT_EQ(closing.reason, Closing::Reason::kFirst);
  EXPECT_EQ(closing.gradients(), kRanks * kEach);
}

TEST_F(SharingTest, AnUpdateClosesWhenAllMicroBatchesAreThere) {
  BeginTraining();
  Say(0, {1, Share{2, 2}});
  Say(1, {0, Share{1, 1}});
  EXPECT_THAT(Decide(), IsEmpty());
  Say(0, {3, Share{3, 3}});
  Say(1, {0, Share{1, 1}});
  EXPECT_THAT(Decide(), IsEmpty()) << "rank 1 is in the middle of one";
  Say(0, {0, Share{3, 3}, false, true});
  Say(1, {1, Share{1, 1}});
  const Closing closing = DecideOne();
  EXPECT_EQ(closing.reason, Closing::Reason::kQuorum);
  EXPECT_EQ(closing.contributions[0].gradients, 3);
  EXPECT_EQ(closing.contributions[1].gradients, 1);
}

TEST_F(SharingTest, WhoWaitsDoesNotCloseAnUpdate) {
  BeginTraining();
  Say(0, {1, Share{1, 1}, false, true});
  Say(1, {1, Share{1, 1}, false, true});
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
  const Closing closing = DecideOne();
  EXPECT_EQ(closing.reason, Closing::Reason::kLiveness);
  EXPECT_EQ(closing.gradients(), 1);
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

TEST_F(SharingTest, TellsWhoIsInTheMiddleOfAMicroBatch) {
  BeginTraining();
  Say(0, {1, Share{1, 1}});
  Say(1, {0, Share{1, 1}});
  EXPECT_THAT(Decide(), IsEmpty());
  EXPECT_EQ(coordinator_.DescribeWaits(now_, false), "update 1 of a waits for micro-batches of ranks 1");
  EXPECT_EQ(coordinator_.DescribeWaits(now_, true), "");
}

TEST_F(SharingTest, RanksThatDisagreeAreToldAtOnce) {
  Say(0, {1});
  Say(1, {1, std::nullopt, false, false, Report::Backlog::kNone, kEach + 1});
  const Closing closing = DecideOne();
  EXPECT_THAT(closing.error, HasSubstr("passes=3"));
}

// Rank 0 has begun a micro-batch, and waits in a collective of Horovod's own, to which rank 1 does not come before the
// update is complete.
TEST_F(SharingTest, ACollectiveWithinAnUpdateIsTold) {
  coordinator_.SetDeadlockAfter(Coordinator::kDeadlockAfter);
  BeginTraining();
  const auto say = [&](int made) {
    Say(0, {0, Share{1, 1}, false, true});
    Say(1, {made, Share{3, 3}, false, true});
  };
  say(3);
  EXPECT_THAT(Decide(), IsEmpty());
  now_ += Coordinator::kDeadlockAfter;
  say(0);
  const Closing closing = DecideOne();
  EXPECT_THAT(closing.error, HasSubstr("rank 0 waits in a collective of Horovod's own"));
  EXPECT_THAT(closing.error, HasSubstr("in a round hook of the optimizer"));
}

}  // namespace
}  // namespace horovod_partial
