// Everything that can happen to 3 ranks with 2 buckets, in every policy, and to 2 ranks of 2 threads: see
// harness/world.h for what is simulated, and what is checked in each step.
//
// Size: 4.1 million states, in 25 s of one core. Each rank takes 3 steps, and stops saying that it waits as soon as its
// result is there. Ranks that go on saying so until they wake up multiply the states (Solo, Together, with bound 1:
// from 27 thousand to over a million), so that is explored with 2 steps. States that differ by which of several ranks
// with the same program does what count once (a sixth of the states), background steps of different ranks are taken in
// one order, and steps without an alternative leave no state behind. Before all that the same case had 6.9 million.
//
// Groups have 1.2 million states, in 20 s: which rank is which counts there, and so does the round.
//
// Families have half a million states, in 5 s. With 3 steps in each case they have 16.7 million, in 3 minutes. Where
// rounds end late they have a million more, in 10 s.
//
// An adaptive quorum, which may be another one in each round, has a sixth of a million states, in 3 s. With 3 steps
// where the staleness bound is 1 they are 0.8 million, which were explored once.
//
// Ranks of two threads have 1.2 million states, in 10 s. 2 ranks show what is of interest: which of their threads
// waits, and what each rank says of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "harness/explorer.h"
#include "harness/world.h"

namespace horovod_partial::test {
namespace {

using testing::Each;
using testing::Gt;
using testing::HasSubstr;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSteps = 2;  // a sanitizer looks for other mistakes, which fewer steps show as well
#else
constexpr int kSteps = 3;
#endif

// --- What the ranks do

using Kind = Op::Kind;

Program operator+(Program a, const Program& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
Program operator*(int times, const Program& program) {
  Program result;
  for (; times > 0; --times) result = result + program;
  return result;
}

const Program kStep = {{Kind::kArrive, 0}, {Kind::kArrive, 1}, {Kind::kWait, 0}, {Kind::kWait, 1}};
const Program kForwards = {{Kind::kArrive, 0}, {Kind::kWait, 0}, {Kind::kArrive, 1}, {Kind::kWait, 1}};
const Program kBackwards = {{Kind::kArrive, 1}, {Kind::kWait, 1}, {Kind::kArrive, 0}, {Kind::kWait, 0}};
const Program kDeliver = {{Kind::kDeliver, 0}, {Kind::kDeliver, 1}};
const Program kJoin = {{Kind::kJoin}};
const Program kFlush = {{Kind::kFlush}};
const Program kForeign = {{Kind::kForeign}};
const Program kEnd = {{Kind::kEnd}};
const Program kClear = {{Kind::kClear, 0}, {Kind::kClear, 1}};

// Programs of `steps` steps, or fewer for some ranks.
struct Scenario {
  const char* name;
  std::vector<Program> (*programs)(int steps);
};

Job MakeJob(const Policy& policy, const Scenario& scenario, int steps) {
  Job job{policy, {}};
  for (const Program& program : scenario.programs(steps)) job.processes.push_back({program});
  return job;
}

// Lateness needs no scenario of its own: every rank may be late in each of them.
const Scenario kTogether = {"Together", [](int n) { return std::vector<Program>(3, n * kStep + kEnd); }};
const Scenario kOppositeOrder = {"BucketsInOppositeOrder", [](int n) {
                                   const Program forwards = kStep + (n - 1) * kForwards + kEnd;
                                   return std::vector<Program>{forwards, kStep + (n - 1) * kBackwards + kEnd, forwards};
                                 }};
const Scenario kOppositeOrderOfTwo = {"OppositeOrderWhileOneHasLeft", [](int n) {
                                        return std::vector<Program>{kStep + (n - 1) * kForwards + kEnd,
                                                                    kStep + (n - 1) * kBackwards + kEnd, kStep + kEnd};
                                      }};
const Scenario kLeavesEarly = {
    "OneLeavesEarly", [](int n) { return std::vector<Program>{n * kStep + kEnd, n * kStep + kEnd, kStep + kEnd}; }};
const Scenario kGoesOnAlone = {
    "OneGoesOnAlone", [](int n) { return std::vector<Program>{kStep + kEnd, n * kStep + kEnd, kStep + kEnd}; }};
const Scenario kParked = {"OneIsParked", [](int n) {
                            const Program others = n * kStep + kForeign + kEnd;
                            return std::vector<Program>{kStep + kForeign + (n - 1) * kStep + kEnd, others, others};
                          }};
const Scenario kJoinsEarly = {"OneJoinsEarly", [](int n) {
                                const Program others = n * kStep + kDeliver + kJoin + kEnd;
                                return std::vector<Program>{others, others, kStep + kDeliver + kJoin + kEnd};
                              }};
const Scenario kDeliversAlone = {"OneDeliversAlone", [](int n) {
                                   const Program others = n * kStep + kEnd;
                                   return std::vector<Program>{others, others,
                                                               (n - 1) * kStep + kDeliver + kStep + kEnd};
                                 }};
const Scenario kFlushOnce = {"AllFlushOnce", [](int n) {
                               const Program others = kStep + kFlush + (n - 1) * kStep + kEnd;
                               return std::vector<Program>{others, others, (n - 1) * kStep + kFlush + kStep + kEnd};
                             }};

// As replicas are compared: the ranks of a flush come together again, in a bucket of which a quorum is all of them.
const Scenario kMeets = {"ThoseOfAFlushMeet", [](int n) {
                           const Program meets = kFlush + Program{{Kind::kArrive, 0}, {Kind::kWait, 0}};
                           const Program others = kStep + meets + (n - 2) * kStep + meets + kEnd;
                           return std::vector<Program>{others, others, kStep + meets + kEnd};
                         }};
const Scenario kClears = {"OneClears", [](int n) {
                            const Program others = n * kStep + kEnd;
                            return std::vector<Program>{others, others, (n - 1) * kStep + kClear + kStep + kEnd};
                          }};
const Scenario kAbandons = {"OneEndsWhileOthersNeedIt", [](int n) {
                              const Program others = (n - 1) * kStep + kForeign + kEnd;
                              return std::vector<Program>{others, others, kStep + kEnd};
                            }};
const Scenario kAlone = {
    "OneRank",
    [](int n) { return std::vector<Program>{kStep + kFlush + kClear + kStep + kDeliver + (n - 2) * kStep + kEnd}; }};

Policy MakePolicy(int quorum, Round max_staleness = 16) {
  Policy policy;
  policy.quorum = quorum;
  policy.max_staleness = max_staleness;
  policy.grace = Time(0);
  return policy;
}
Policy MakeInitiator(std::uint64_t seed, Round max_staleness = 16) {
  Policy policy = MakePolicy(1, max_staleness);
  policy.rule = Policy::Rule::kInitiator;
  policy.seed = seed;
  return policy;
}

struct NamedPolicy {
  const char* name;
  Policy policy;
};
const NamedPolicy kPolicies[] = {
    {"Solo", MakePolicy(1)},    {"Majority", MakePolicy(2)},  // of 3 ranks, so Quorum(2) too
    {"Quorum3", MakePolicy(3)}, {"Initiator1", MakeInitiator(1)}, {"Initiator2", MakeInitiator(2)},
};

Policy MakeReady(int group_size) {
  Policy policy = MakePolicy(1);
  policy.rule = Policy::Rule::kReady;
  policy.group_size = group_size;
  policy.window = 4;
  return policy;
}
Policy MakeButterfly(Round period, Round max_staleness = 16) {
  Policy policy = MakePolicy(1, max_staleness);
  policy.schedule.kind = Schedule::Kind::kButterfly;
  policy.schedule.group_size = 2;
  policy.period = period;
  return policy;
}

// --- The tests

// A suite of jobs that must keep the rules. What its explorations have seen together is kept for its end.
template <class Param>
class ExplorerTest : public testing::TestWithParam<Param> {
 protected:
  void KeepsTheRules(const Job& job) {
    const Exploration result = Explore(World(job, coverage_));
    EXPECT_EQ(result.violation, "") << result.trace;
    EXPECT_GT(result.ends, 0u);
    states_ += result.states;
    ends_ += result.ends;
    this->RecordProperty("states", std::to_string(result.states));
  }
  // Otherwise the suite has not seen what it is there for. (A filter on the command line may be the reason.)
  static bool SawAllCases() {
    std::printf("explored %zu states, with %zu ends\n", states_, ends_);
    const auto* info = testing::UnitTest::GetInstance()->current_test_suite();
    return info->test_to_run_count() >= info->total_test_count();
  }
  static inline Coverage coverage_;
  static inline std::size_t states_ = 0;
  static inline std::size_t ends_ = 0;
};

using Case = std::tuple<NamedPolicy, Round, Scenario>;

std::ostream& operator<<(std::ostream& out, const NamedPolicy& policy) { return out << policy.name; }
std::ostream& operator<<(std::ostream& out, const Scenario& scenario) { return out << scenario.name; }

std::string NameOfCase(const testing::TestParamInfo<Case>& info) {
  const auto& [policy, bound, scenario] = info.param;
  return std::string(policy.name) + "_Bound" + std::to_string(bound) + "_" + scenario.name;
}

class AllCasesTest : public ExplorerTest<Case> {
 protected:
  static void TearDownTestSuite() {
    if (!SawAllCases()) return;
    EXPECT_THAT(coverage_.closings, Each(Gt(0u)));
    EXPECT_GT(coverage_.on_time, 0u);
    EXPECT_GT(coverage_.late, 0u);
    EXPECT_GT(coverage_.while_running, 0u);
    EXPECT_GT(coverage_.slipped, 0u);
    EXPECT_GT(coverage_.pending_delivered, 0u);
  }
};

TEST_P(AllCasesTest, KeepTheRules) {
  auto [policy, bound, scenario] = GetParam();
  policy.policy.max_staleness = bound;
  const Job job = MakeJob(policy.policy, scenario, kSteps);
  KeepsTheRules(job);
}

INSTANTIATE_TEST_SUITE_P(All, AllCasesTest,
                         testing::Combine(testing::ValuesIn(kPolicies), testing::Values(0, 1, 16),
                                          testing::Values(kTogether, kOppositeOrder, kOppositeOrderOfTwo, kLeavesEarly,
                                                          kGoesOnAlone, kParked, kJoinsEarly, kDeliversAlone,
                                                          kFlushOnce)),
                         NameOfCase);

// --- What only some jobs have: ends of rounds that come late, time, requests for full rounds, sets of one rank

struct ExtraCase {
  const char* name;
  Policy policy;
  Scenario scenario;
  int steps;
  bool late_ends = false;
  bool clock = false;
};

std::ostream& operator<<(std::ostream& out, const ExtraCase& extra) { return out << extra.name; }

Policy WithGrace(Policy policy) {
  policy.grace = kLong;
  return policy;
}

class ExtraCasesTest : public ExplorerTest<ExtraCase> {
 protected:
  static void TearDownTestSuite() {
    if (!SawAllCases()) return;
    EXPECT_GT(coverage_.full_requests, 0u);
    EXPECT_GT(coverage_.late_ends, 0u);
    EXPECT_GT(coverage_.abandoned, 0u);
  }
};

TEST_P(ExtraCasesTest, KeepTheRules) {
  const ExtraCase& extra = GetParam();
  Job job = MakeJob(extra.policy, extra.scenario, extra.steps);
  job.late_ends = extra.late_ends;
  job.clock = extra.clock;
  KeepsTheRules(job);
}

const ExtraCase kExtraCases[] = {
    {"SoloClears", MakePolicy(1), kClears, 2},
    {"SoloClearsWithBound1", MakePolicy(1, 1), kClears, kSteps},
    {"MajorityClears", MakePolicy(2), kClears, kSteps},
    {"Quorum3Clears", MakePolicy(3), kClears, 2},
    {"Quorum3MeetsAfterFlushes", MakePolicy(3), kMeets, kSteps},
    {"Quorum3MeetsAfterFlushesWithTime", MakePolicy(3), kMeets, 2, false, true},
    {"Quorum3MeetsAfterFlushesAndEndsLate", MakePolicy(3), kMeets, 2, true},
    {"SoloEndsLate", MakePolicy(1), kTogether, 2, true},
    {"MajorityEndsLate", MakePolicy(2), kTogether, kSteps, true},
    {"MajorityEndsLateInOppositeOrder", MakePolicy(2), kOppositeOrder, 2, true},
    {"MajorityEndsLateAndFlushes", MakePolicy(2), kFlushOnce, 2, true},
    {"MajorityEndsLateAndOneLeaves", MakePolicy(2), kLeavesEarly, 2, true},
    {"MajorityEndsLateAndOneJoins", MakePolicy(2), kJoinsEarly, 2, true},
    {"SoloEndsLateAndOneDelivers", MakePolicy(1), kDeliversAlone, 2, true},
    {"SoloEndsLateAndOneClears", MakePolicy(1), kClears, 2, true},
    {"MajorityEndsLateAndOneIsParked", MakePolicy(2), kParked, 2, true},
    {"Ready2EndsLate", MakeReady(2), kTogether, 2, true},
    {"Ready2EndsLateAndFlushes", MakeReady(2), kFlushOnce, 2, true},
    {"ButterflyEndsLate", MakeButterfly(2), kTogether, 2, true},
    {"ButterflyWithBound0EndsLateAndOneClears", MakeButterfly(0, 0), kClears, 2, true},
    {"ButterflyEndsLateAndFlushes", MakeButterfly(2), kFlushOnce, 2, true},
    {"SoloWithGrace", WithGrace(MakePolicy(1)), kTogether, kSteps, false, true},
    {"MajorityWithGrace", WithGrace(MakePolicy(2)), kTogether, kSteps, false, true},
    {"MajorityWithGraceInOppositeOrder", WithGrace(MakePolicy(2)), kOppositeOrder, 2, false, true},
    {"MajorityAbandons", MakePolicy(2), kAbandons, 2, false, true},
    {"Quorum3Abandons", MakePolicy(3), kAbandons, 2, false, true},
    {"MajorityFlushesWithTime", MakePolicy(2), kFlushOnce, 2, false, true},
    {"Quorum3LeavesEarlyWithTime", MakePolicy(3), kLeavesEarly, 2, false, true},
    {"MajorityInOppositeOrderWithTime", MakePolicy(2), kOppositeOrder, 2, false, true},
    {"SoloAlone", MakePolicy(1), kAlone, kSteps, true},
};

INSTANTIATE_TEST_SUITE_P(All, ExtraCasesTest, testing::ValuesIn(kExtraCases),
                         [](const testing::TestParamInfo<ExtraCase>& info) { return info.param.name; });

// --- Groups: models of a schedule's groups, which are kept and sent again, or of the first ranks that are ready

class GroupsTest : public ExplorerTest<std::tuple<NamedPolicy, Scenario>> {
 protected:
  static void TearDownTestSuite() {
    if (!SawAllCases()) return;
    EXPECT_GT(coverage_.late, 0u);
    EXPECT_GT(coverage_.left_out, 0u);
    EXPECT_GT(coverage_.sent_again, 0u);
    EXPECT_GT(coverage_.slipped, 0u);
  }
};

TEST_P(GroupsTest, KeepTheRules) {
  const auto& [policy, scenario] = GetParam();
  KeepsTheRules(MakeJob(policy.policy, scenario, kSteps));
}

INSTANTIATE_TEST_SUITE_P(
    All, GroupsTest,
    testing::Combine(testing::Values(NamedPolicy{"Ready2", MakeReady(2)}, NamedPolicy{"Ready3", MakeReady(3)},
                                     NamedPolicy{"ButterflyAndFullRounds", MakeButterfly(2)},
                                     NamedPolicy{"ButterflyWithBound0", MakeButterfly(0, 0)},
                                     NamedPolicy{"ButterflyWithBound1", MakeButterfly(0, 1)}),
                     testing::Values(kTogether, kOppositeOrder, kOppositeOrderOfTwo, kLeavesEarly, kGoesOnAlone,
                                     kParked, kJoinsEarly, kFlushOnce, kClears, kAlone)),
    [](const testing::TestParamInfo<GroupsTest::ParamType>& info) {
      return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name;
    });

// --- Families: the results of both buckets are taken as whole rounds

const Program kTake = {{Kind::kTake}};
const Program kWhole = kStep + kTake;
const Program kWholeBackwards =
    Program{{Kind::kArrive, 1}, {Kind::kArrive, 0}, {Kind::kWait, 1}, {Kind::kWait, 0}} + kTake;
const Program kDeliverAll = {{Kind::kDeliver, 0}};
const Program kClearAll = {{Kind::kClear, 0}};

const Scenario kFamilyTogether = {"Together", [](int n) { return std::vector<Program>(3, n * kWhole + kEnd); }};
const Scenario kFamilyOppositeOrder = {"MembersInOppositeOrder", [](int n) {
                                         const Program forwards = n * kWhole + kEnd;
                                         return std::vector<Program>{
                                             forwards, kWhole + (n - 1) * kWholeBackwards + kEnd, forwards};
                                       }};
const Scenario kFamilyLeavesEarly = {"OneLeavesEarly", [](int n) {
                                       const Program others = n * kWhole + kEnd;
                                       return std::vector<Program>{others, others, kWhole + kEnd};
                                     }};
const Scenario kFamilyGoesOnAlone = {"OneGoesOnAlone", [](int n) {
                                       return std::vector<Program>{kWhole + kFlush + kEnd, n * kWhole + kFlush + kEnd,
                                                                   kWhole + kFlush + kEnd};
                                     }};
const Scenario kFamilyParked = {"OneIsParked", [](int n) {
                                  const Program others = n * kWhole + kForeign + kEnd;
                                  return std::vector<Program>{kWhole + kForeign + (n - 1) * kWhole + kEnd, others,
                                                              others};
                                }};
const Program kBackward = {{Kind::kArrive, 0}, {Kind::kArrive, 1}};
const Program kRest = {{Kind::kWait, 0}, {Kind::kWait, 1}, {Kind::kTake, 0}};
const Scenario kFamilyParkedInStep = {
    "OneIsParkedInAStep", [](int n) {
      const Program others = n * kWhole + kForeign + kEnd;
      return std::vector<Program>{kWhole + kBackward + kForeign + kRest + (n - 2) * kWhole + kEnd, others, others};
    }};
const Scenario kFamilyJoins = {"OneJoinsEarly", [](int n) {
                                 const Program others = n * kWhole + kDeliverAll + kJoin + kEnd;
                                 return std::vector<Program>{others, others, kWhole + kDeliverAll + kJoin + kEnd};
                               }};
const Scenario kFamilyDelivers = {"OneDelivers", [](int n) {
                                    const Program others = n * kWhole + kEnd;
                                    return std::vector<Program>{others, others,
                                                                (n - 1) * kWhole + kDeliverAll + kWhole + kEnd};
                                  }};
const Scenario kFamilyFlushes = {"AllFlushOnce", [](int n) {
                                   const Program others = kWhole + kFlush + (n - 1) * kWhole + kEnd;
                                   return std::vector<Program>{others, others,
                                                               (n - 1) * kWhole + kFlush + kWhole + kEnd};
                                 }};
const Scenario kFamilyClears = {"OneClears", [](int n) {
                                  const Program others = n * kWhole + kEnd;
                                  return std::vector<Program>{others, others,
                                                              (n - 1) * kWhole + kClearAll + kWhole + kEnd};
                                }};

class FamiliesTest : public ExplorerTest<Case> {
 protected:
  static void TearDownTestSuite() {
    if (!SawAllCases()) return;
    EXPECT_GT(coverage_.late, 0u);
    EXPECT_GT(coverage_.parted, 0u);
    EXPECT_GT(coverage_.held, 0u);
    EXPECT_GT(coverage_.drained, 0u);
    EXPECT_GT(coverage_.kept, 0u);
    EXPECT_GT(coverage_.taken_meanwhile, 0u);
  }
};

Job MakeFamily(const Policy& policy, const Scenario& scenario, int steps) {
  Job job = MakeJob(policy, scenario, steps);
  job.family = true;
  job.never_sums = scenario.name == kFamilyParked.name || scenario.name == kFamilyParkedInStep.name;
  return job;
}

TEST_P(FamiliesTest, KeepTheRules) {
  auto [policy, bound, scenario] = GetParam();
  policy.policy.max_staleness = bound;
  // Solo has 16 million states with 3 steps, which were explored once.
  const bool is_large = scenario.name == kFamilyOppositeOrder.name || scenario.name == kFamilyDelivers.name ||
                        scenario.name == kFamilyClears.name;
  const bool many = policy.policy.quorum == 1 && (bound > 1 || is_large);
  KeepsTheRules(MakeFamily(policy.policy, scenario, many ? 2 : kSteps));
}

INSTANTIATE_TEST_SUITE_P(
    All, FamiliesTest,
    testing::Combine(testing::Values(NamedPolicy{"Solo", MakePolicy(1)}, NamedPolicy{"Majority", MakePolicy(2)},
                                     NamedPolicy{"Quorum3", MakePolicy(3)}),
                     testing::Values(1, 16),
                     testing::Values(kFamilyTogether, kFamilyOppositeOrder, kFamilyLeavesEarly, kFamilyGoesOnAlone,
                                     kFamilyParked, kFamilyParkedInStep, kFamilyJoins, kFamilyDelivers, kFamilyFlushes,
                                     kFamilyClears)),
    NameOfCase);

using LateCase = std::tuple<NamedPolicy, Scenario>;

class FamiliesEndLateTest : public ExplorerTest<LateCase> {
 protected:
  static void TearDownTestSuite() {
    if (!SawAllCases()) return;
    EXPECT_GT(coverage_.late_ends, 0u);
    EXPECT_GT(coverage_.parted, 0u);
    EXPECT_GT(coverage_.drained, 0u);
  }
};

TEST_P(FamiliesEndLateTest, KeepTheRules) {
  const auto& [policy, scenario] = GetParam();
  Job job = MakeFamily(policy.policy, scenario, 2);
  job.late_ends = true;
  KeepsTheRules(job);
}

std::string NameOfLateCase(const testing::TestParamInfo<LateCase>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).name;
}

// Of `Solo()` with the other scenarios there are 2 million states, which were explored once.
INSTANTIATE_TEST_SUITE_P(Solo, FamiliesEndLateTest,
                         testing::Combine(testing::Values(NamedPolicy{"Solo", MakePolicy(1, 1)}),
                                          testing::Values(kFamilyLeavesEarly, kFamilyGoesOnAlone, kFamilyParked,
                                                          kFamilyJoins, kFamilyFlushes, kFamilyClears)),
                         NameOfLateCase);
INSTANTIATE_TEST_SUITE_P(Majority, FamiliesEndLateTest,
                         testing::Combine(testing::Values(NamedPolicy{"Majority", MakePolicy(2)}),
                                          testing::Values(kFamilyTogether, kFamilyOppositeOrder, kFamilyLeavesEarly,
                                                          kFamilyGoesOnAlone, kFamilyParked, kFamilyJoins,
                                                          kFamilyDelivers, kFamilyFlushes, kFamilyClears)),
                         NameOfLateCase);

// --- An adaptive quorum, which may be another one in each round

Policy MakeAuto(int least, Round max_staleness = 16) {
  Policy policy = MakePolicy(least, max_staleness);
  policy.rule = Policy::Rule::kAuto;
  return policy;
}

struct AutoCase {
  const char* name;
  Policy policy;
  Scenario scenario;
  int steps;
  bool family = false;
  bool late_ends = false;
  std::vector<int> quorums = {3, 1};
};

std::ostream& operator<<(std::ostream& out, const AutoCase& each) { return out << each.name; }

class AutoTest : public ExplorerTest<AutoCase> {
 protected:
  static void TearDownTestSuite() {
    if (!SawAllCases()) return;
    EXPECT_GT(coverage_.quorum_changes, 0u);
    EXPECT_GT(coverage_.late, 0u);
    EXPECT_GT(coverage_.parted, 0u);
  }
};

TEST_P(AutoTest, KeepsTheRules) {
  const AutoCase& each = GetParam();
  Job job = MakeJob(each.policy, each.scenario, each.steps);
  job.quorums = each.quorums;
  job.family = each.family;
  job.late_ends = each.late_ends;
  KeepsTheRules(job);
}

const AutoCase kAutoCases[] = {
    {"Together", MakeAuto(1), kTogether, 2, false, false, {3, 2, 1}},
    {"TogetherWithBound1", MakeAuto(1, 1), kTogether, 2},
    {"InOppositeOrder", MakeAuto(1), kOppositeOrder, 2},
    {"OneLeavesEarly", MakeAuto(1), kLeavesEarly, kSteps},
    {"OneIsParked", MakeAuto(2), kParked, 2, false, false, {3, 2}},
    {"OneJoinsEarly", MakeAuto(1), kJoinsEarly, 2},
    {"AllFlushOnce", MakeAuto(1), kFlushOnce, 2},
    {"OneClears", MakeAuto(1), kClears, 2},
    {"EndsLate", MakeAuto(2), kTogether, 2, false, true, {3, 2}},
    {"FamilyTogether", MakeAuto(1), kFamilyTogether, 2, true},
    {"FamilyWithBound1", MakeAuto(1, 1), kFamilyTogether, 2, true},
    {"FamilyInOppositeOrder", MakeAuto(2), kFamilyOppositeOrder, 2, true, false, {3, 2}},
    {"FamilyLeavesEarly", MakeAuto(1), kFamilyLeavesEarly, 2, true},
    {"FamilyFlushes", MakeAuto(1), kFamilyFlushes, 2, true},
};

INSTANTIATE_TEST_SUITE_P(All, AutoTest, testing::ValuesIn(kAutoCases),
                         [](const testing::TestParamInfo<AutoCase>& info) { return info.param.name; });

// --- Two threads in a rank, each with a bucket of its own unless a scenario says otherwise

const Program kA = {{Kind::kArrive, 0}, {Kind::kWait, 0}};
const Program kB = {{Kind::kArrive, 1}, {Kind::kWait, 1}};
const Program kC = {{Kind::kArrive, 2}, {Kind::kWait, 2}};
const Program kMeet = {{Kind::kMeet}};

struct ThreadsScenario {
  const char* name;
  std::vector<Process> (*processes)(int steps);
  int buckets = 2;
  bool silence = false;  // without the fallback of rule 7 the job would stand still
  bool queues = false;   // and rule 7 may be wrong
};

const ThreadsScenario kEachItsBucket = {"EachItsBucket",
                                        [](int n) { return std::vector<Process>(2, {n * kA + kEnd, n * kB}); }};
const ThreadsScenario kThreeRanks = {"ThreeRanks",
                                     [](int) { return std::vector<Process>(3, {2 * kA + kEnd, 2 * kB}); }};
const ThreadsScenario kOneThreadEndsEarly = {
    "OneThreadEndsEarly", [](int n) { return std::vector<Process>{{n * kA + kEnd, kB}, {n * kA + kEnd, n * kB}}; }};
// The threads meet first: a flush refuses round 0 of a bucket that no thread of its rank has come to.
const ThreadsScenario kOneThreadFlushes = {"OneThreadFlushes", [](int n) {
                                             const Program flushes = kA + kMeet + kFlush + (n - 1) * kA + kEnd;
                                             return std::vector<Process>(2, {flushes, kB + kMeet + (n - 1) * kB});
                                           }};
const ThreadsScenario kOneRankFlushes = {"OneRankFlushes", [](int n) {
                                           const Program flushes = kA + kMeet + kFlush + (n - 1) * kA + kEnd;
                                           return std::vector<Process>{{flushes, kB + kMeet + (n - 1) * kB},
                                                                       {n * kA + kEnd, n * kB}};
                                         }};
const ThreadsScenario kOneThreadIsParked = {"OneThreadIsParked", [](int n) {
                                              const Program parks = kA + kForeign + (n - 1) * kA + kEnd;
                                              return std::vector<Process>{{parks, n * kB},
                                                                          {n * kA + kForeign + kEnd, n * kB}};
                                            }};
// The first threads have two buckets, and take them in opposite order.
const ThreadsScenario kThreadsInOppositeOrder = {"OppositeOrder",
                                                 [](int n) {
                                                   const Program first = kStep + (n - 1) * (kA + kB) + kEnd;
                                                   return std::vector<Process>{
                                                       {first, n * kC}, {kStep + (n - 1) * (kB + kA) + kEnd, n * kC}};
                                                 },
                                                 3};
// In each rank a bucket has lost its thread while the other rank waits there.
const ThreadsScenario kEndCrosswise = {
    "EndCrosswise", [](int n) { return std::vector<Process>{{n * kA + kEnd, kB}, {kA + kEnd, n * kB}}; }, 2, true};
// The threads of a rank wait for each other by queues, at different times in each rank.
const ThreadsScenario kQueues = {"Queues",
                                 [](int n) {
                                   const Program early_a = kA + kMeet + (n - 1) * kA + kEnd;
                                   const Program early_b = kB + kMeet + (n - 1) * kB;
                                   return std::vector<Process>{{(n - 1) * kA + kMeet + kA + kEnd, early_b},
                                                               {early_a, (n - 1) * kB + kMeet + kB}};
                                 },
                                 2, true, true};
const ThreadsScenario kHandedOver = {
    "BucketsAreHandedOver",
    [](int n) { return std::vector<Process>(2, {kA + kMeet + (n - 1) * kB + kEnd, kB + kMeet + (n - 1) * kA}); }, 2,
    true, true};

std::ostream& operator<<(std::ostream& out, const ThreadsScenario& scenario) { return out << scenario.name; }

Job MakeJob(const Policy& policy, const ThreadsScenario& scenario, int steps) {
  Job job{policy, scenario.processes(steps)};
  job.buckets = scenario.buckets;
  job.silence = scenario.silence;
  job.queues = scenario.queues;
  return job;
}

const NamedPolicy kSolo = {"Solo", MakePolicy(1)};
const NamedPolicy kSoloWithBound1 = {"SoloWithBound1", MakePolicy(1, 1)};
const NamedPolicy kEverybody = {"Everybody", MakePolicy(3)};

using ThreadsCase = std::tuple<NamedPolicy, ThreadsScenario, bool>;  // rounds may end late, as with ExtraCase

std::string NameOfThreadsCase(const testing::TestParamInfo<ThreadsCase>& info) {
  const auto& [policy, scenario, late_ends] = info.param;
  return std::string(policy.name) + "_" + scenario.name;
}

class ThreadsTest : public ExplorerTest<ThreadsCase> {
 protected:
  static void TearDownTestSuite() {
    if (!SawAllCases()) return;
    EXPECT_GT(coverage_.said_of_some, 0u);
  }
};

TEST_P(ThreadsTest, KeepTheRules) {
  const auto& [policy, scenario, late_ends] = GetParam();
  Job job = MakeJob(policy.policy, scenario, late_ends ? 2 : kSteps);
  job.late_ends = late_ends;
  KeepsTheRules(job);
}

const auto kThreadsScenarios =
    testing::Values(kEachItsBucket, kThreeRanks, kOneThreadEndsEarly, kOneThreadFlushes, kOneRankFlushes,
                    kOneThreadIsParked, kThreadsInOppositeOrder, kEndCrosswise, kQueues, kHandedOver);

INSTANTIATE_TEST_SUITE_P(All, ThreadsTest,
                         testing::Combine(testing::Values(kSolo, kSoloWithBound1, kEverybody), kThreadsScenarios,
                                          testing::Values(false)),
                         NameOfThreadsCase);
INSTANTIATE_TEST_SUITE_P(EndsLate, ThreadsTest,
                         testing::Combine(testing::Values(kSolo, kEverybody), kThreadsScenarios, testing::Values(true)),
                         NameOfThreadsCase);

// --- Planted bugs

struct PlantedBug {
  const char* name;
  Bug bug;
  Job job;
  const char* violation;
};

std::ostream& operator<<(std::ostream& out, const PlantedBug& planted) { return out << planted.name; }

class PlantedBugTest : public testing::TestWithParam<PlantedBug> {};

TEST_P(PlantedBugTest, IsFound) {
  const PlantedBug& planted = GetParam();
  Job job = planted.job;
  Coverage coverage;
  EXPECT_EQ(Explore(World(job, coverage)).violation, "") << "without the bug";
  job.bug = planted.bug;
  const Exploration result = Explore(World(job, coverage));
  EXPECT_THAT(result.violation, HasSubstr(planted.violation));
  EXPECT_FALSE(result.trace.empty());
}

template <class AnyScenario>
Job Plain(const Policy& policy, const AnyScenario& scenario) {
  return MakeJob(policy, scenario, 3);
}

const PlantedBug kBugs[] = {
    {"WaitingIsNotReported", Bug::kWaitingIsNotReported, Plain(MakePolicy(2), kOppositeOrderOfTwo), "deadlock"},
    {"WaitingIsNotReportedToAll", Bug::kWaitingIsNotReported, Plain(MakePolicy(3), kOppositeOrder), "deadlock"},
    {"WaitingIsNotReportedByThreads", Bug::kWaitingIsNotReported, Plain(MakePolicy(2), kThreadsInOppositeOrder),
     "deadlock"},
    {"WaitingIsOneFlag", Bug::kWaitingIsOneFlag, Plain(MakePolicy(2), kEachItsBucket), "where a thread of it may"},
    {"FlushIsOneFlag", Bug::kFlushIsOneFlag, Plain(MakePolicy(2), kOneThreadFlushes), "where a thread of it may"},
    {"SilenceIsNotNoticed", Bug::kSilenceIsNotNoticed, Plain(MakePolicy(2), kEndCrosswise), "deadlock"},
    {"SilenceOfQueuesIsNotNoticed", Bug::kSilenceIsNotNoticed, Plain(MakePolicy(2), kQueues), "deadlock"},
    {"ParkedIsNotReported", Bug::kParkedIsNotReported, Plain(MakePolicy(3), kParked), "deadlock"},
    {"JoinedIsNotTold", Bug::kJoinedIsNotTold, Plain(MakePolicy(3), kJoinsEarly), "deadlock"},
    {"PendingIsForgotten", Bug::kPendingIsForgotten, Plain(MakePolicy(2), kTogether), "not the sum of what was due"},
    {"PendingIsNotReported", Bug::kPendingIsNotReported, Plain(MakePolicy(2), kTogether),
     "closed with another contribution"},
    {"QuorumIsOneTooSmall", Bug::kQuorumIsOneTooSmall, Plain(MakePolicy(2), kTogether), "the quorum is not reached"},
    {"BoundIsOneTooLarge", Bug::kBoundIsOneTooLarge, Plain(MakePolicy(1, 1), kTogether),
     "the staleness bound is broken"},
    {"RoundsAreNotHeld", Bug::kRoundsAreNotHeld, MakeFamily(MakePolicy(1, 1), kFamilyTogether, 3),
     "more untaken results"},
    {"RoundsAreNotHeldForAFlush", Bug::kRoundsAreNotHeld, MakeFamily(MakePolicy(1), kFamilyLeavesEarly, 3),
     "a rank that drains"},
    {"ForeignDoesNotDrain", Bug::kForeignDoesNotDrain, MakeFamily(MakePolicy(1), kFamilyParked, 3), "added up"},
    {"DeliveryIsPartial", Bug::kDeliveryIsPartial, MakeFamily(MakePolicy(1, 1), kFamilyJoins, 3), "out of step"},
    {"FlushIsNotBounded", Bug::kFlushIsNotBounded, MakeFamily(MakePolicy(1, 16), kFamilyFlushes, 2), "other rounds"},
    {"ResultsAreOverwritten", Bug::kResultsAreOverwritten, Plain(MakePolicy(1), kTogether), "not those of the rounds"},
};

INSTANTIATE_TEST_SUITE_P(All, PlantedBugTest, testing::ValuesIn(kBugs),
                         [](const testing::TestParamInfo<PlantedBug>& info) { return info.param.name; });

}  // namespace
}  // namespace horovod_partial::test
