// Everything that can happen to 3 ranks with 2 buckets, in every policy, and to 2 ranks of 2 threads: see
// harness/world.h for what is simulated, and what is checked in each step.
//
// Size: 4.1 million states, in 25 s of one core. Each rank takes 3 steps, and stops saying that it waits as soon as its
// result is there. Ranks that go on saying so until they wake up multiply the states (Solo, Together, with bound 1:
// from 27 thousand to over a million), so that is explored with 2 steps. States that differ by which of several ranks
// with the same program does what count once (a sixth of the states), background steps of different ranks are taken in
// one order, and steps without an alternative leave no state behind. Before all that the same case had 6.9 million.
//
// An explorer that finds no bug proves nothing: the defects of mutants.toml show that this one finds them.
//
// Groups have 1.2 million states, in 20 s: which rank is which counts there, and so does the round.
//
// Families have half a million states, in 5 s. With 3 steps in each case they have 16.7 million, in 3 minutes. Where
// rounds end late they have a million more, in 10 s.
//
// Ranks of two threads have 1.2 million states, in 10 s. 2 ranks show what is of interest: which of their threads
// waits, and what each rank says of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <ostream>
#include <string>
#include <vector>

#include "harness/explorer.h"
#include "harness/policies.h"
#include "harness/world.h"

namespace horovod_partial::test {
namespace {

using testing::Each;
using testing::Gt;

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
const Program kTake = {{Kind::kTake}};
const Program kJoin = {{Kind::kJoin}};
const Program kFlush = {{Kind::kFlush}};
const Program kForeign = {{Kind::kForeign}};
const Program kEnd = {{Kind::kEnd}};

// What ranks do with buckets by themselves, or with a family, whose results are taken as whole rounds.
struct Kit {
  bool family;
  Program step;
  Program forwards;  // the two orders in which ranks may come to the buckets
  Program backwards;
  Program deliver;
  Program clear;
};
const Kit kPlain = {false,
                    kStep,
                    kForwards,
                    kBackwards,
                    {{Kind::kDeliver, 0}, {Kind::kDeliver, 1}},
                    {{Kind::kClear, 0}, {Kind::kClear, 1}}};
const Kit kFamily = {true,
                     kStep + kTake,
                     kStep + kTake,
                     Program{{Kind::kArrive, 1}, {Kind::kArrive, 0}, {Kind::kWait, 1}, {Kind::kWait, 0}} + kTake,
                     {{Kind::kDeliver, 0}},
                     {{Kind::kClear, 0}}};

// Processes of one thread or of two each, of `n` steps, or of fewer for some ranks.
struct Scenario {
  const char* name;
  std::vector<Process> (*processes)(const Kit& kit, int n);
  int buckets = 2;
  bool silence = false;     // without the fallback of rule 7 the job would stand still
  bool queues = false;      // and rule 7 may be wrong
  bool never_sums = false;  // no rank of a family has to add rounds up
};

Scenario NeverSums(Scenario scenario) { return scenario.never_sums = true, scenario; }

std::vector<Process> OneThreadEach(const Program& first, const Program& second, const Program& third) {
  return {{first}, {second}, {third}};
}

// Lateness needs no scenario of its own: every rank may be late in each of them.
const Scenario kTogether = {"Together",
                            [](const Kit& kit, int n) { return std::vector<Process>(3, {n * kit.step + kEnd}); }};
const Scenario kOppositeOrder = {"OppositeOrder", [](const Kit& kit, int n) {
                                   const Program forwards = kit.step + (n - 1) * kit.forwards + kEnd;
                                   return OneThreadEach(forwards, kit.step + (n - 1) * kit.backwards + kEnd, forwards);
                                 }};
const Scenario kOppositeOrderOfTwo = {"OppositeOrderWhileOneHasLeft", [](const Kit& kit, int n) {
                                        return OneThreadEach(kit.step + (n - 1) * kit.forwards + kEnd,
                                                             kit.step + (n - 1) * kit.backwards + kEnd,
                                                             kit.step + kEnd);
                                      }};
const Scenario kLeavesEarly = {"OneLeavesEarly", [](const Kit& kit, int n) {
                                 return OneThreadEach(n * kit.step + kEnd, n * kit.step + kEnd, kit.step + kEnd);
                               }};
const Scenario kGoesOnAlone = {"OneGoesOnAlone", [](const Kit& kit, int n) {
                                 const Program ends = kit.family ? kFlush + kEnd : kEnd;
                                 return OneThreadEach(kit.step + ends, n * kit.step + ends, kit.step + ends);
                               }};
const Scenario kParked =
    NeverSums({"OneIsParked", [](const Kit& kit, int n) {
                 const Program others = n * kit.step + kForeign + kEnd;
                 return OneThreadEach(kit.step + kForeign + (n - 1) * kit.step + kEnd, others, others);
               }});
// Of a family.
const Scenario kParkedInStep =
    NeverSums({"OneIsParkedInAStep", [](const Kit& kit, int n) {
                 const Program arrive = {{Kind::kArrive, 0}, {Kind::kArrive, 1}};
                 const Program rest = {{Kind::kWait, 0}, {Kind::kWait, 1}, {Kind::kTake, 0}};
                 const Program others = n * kit.step + kForeign + kEnd;
                 return OneThreadEach(kit.step + arrive + kForeign + rest + (n - 2) * kit.step + kEnd, others, others);
               }});
const Scenario kJoinsEarly = {"OneJoinsEarly", [](const Kit& kit, int n) {
                                const Program others = n * kit.step + kit.deliver + kJoin + kEnd;
                                return OneThreadEach(others, others, kit.step + kit.deliver + kJoin + kEnd);
                              }};
// A rank of a family joins before its first step, once or twice, and trains after the flush that ends a join.
const Program kWaitForBoth = {{Kind::kWait, 0}, {Kind::kWait, 1}};
const Program kJoinAndFlush = kJoin + kWaitForBoth + kFlush;
const Scenario kJoinsFirst = {"OneJoinsFirst", [](const Kit& kit, int n) {
                                const Program others =
                                    kit.step + kit.deliver + kJoinAndFlush + (n - 1) * kit.step + kEnd;
                                return OneThreadEach(others, others, kJoinAndFlush + (n - 1) * kit.step + kEnd);
                              }};
const Scenario kJoinsTwice = {"OneJoinsTwice", [](const Kit& kit, int n) {
                                const Program join = kit.deliver + kJoinAndFlush;
                                const Program others = (n - 1) * kit.step + join + kit.step + join + kEnd;
                                return OneThreadEach(others, others, 2 * kJoinAndFlush + kEnd);
                              }};
const Scenario kJoinsAndEnds = {"OneJoinsFirstAndOneEnds", [](const Kit& kit, int n) {
                                  const Program others = (n - 1) * kit.step + kit.deliver + kJoinAndFlush;
                                  return OneThreadEach(others + kit.step + kEnd, others + kEnd,
                                                       kJoinAndFlush + kit.step + kEnd);
                                }};
const Scenario kDelivers = {"OneDelivers", [](const Kit& kit, int n) {
                              const Program others = n * kit.step + kEnd;
                              return OneThreadEach(others, others, (n - 1) * kit.step + kit.deliver + kit.step + kEnd);
                            }};
const Scenario kFlushOnce = {"AllFlushOnce", [](const Kit& kit, int n) {
                               const Program others = kit.step + kFlush + (n - 1) * kit.step + kEnd;
                               return OneThreadEach(others, others, (n - 1) * kit.step + kFlush + kit.step + kEnd);
                             }};
// As replicas are compared: the ranks of a flush come together again, in a bucket of which a quorum is all of them.
const Scenario kMeets = {"ThoseOfAFlushMeet", [](const Kit& kit, int n) {
                           const Program meets = kFlush + Program{{Kind::kArrive, 0}, {Kind::kWait, 0}};
                           const Program others = kit.step + meets + (n - 2) * kit.step + meets + kEnd;
                           return OneThreadEach(others, others, kit.step + meets + kEnd);
                         }};
const Scenario kClears = {"OneClears", [](const Kit& kit, int n) {
                            const Program others = n * kit.step + kEnd;
                            return OneThreadEach(others, others, (n - 1) * kit.step + kit.clear + kit.step + kEnd);
                          }};
const Scenario kAbandons = {"OneEndsWhileOthersNeedIt", [](const Kit& kit, int n) {
                              const Program others = (n - 1) * kit.step + kForeign + kEnd;
                              return OneThreadEach(others, others, kit.step + kEnd);
                            }};
const Scenario kAlone = {
    "OneRank", [](const Kit& kit, int n) {
      return std::vector<Process>{{kit.step + kFlush + kit.clear + kit.step + kit.deliver + (n - 2) * kit.step + kEnd}};
    }};

// Two threads in a rank, each with a bucket of its own unless a scenario says otherwise.
const Program kA = {{Kind::kArrive, 0}, {Kind::kWait, 0}};
const Program kB = {{Kind::kArrive, 1}, {Kind::kWait, 1}};
const Program kC = {{Kind::kArrive, 2}, {Kind::kWait, 2}};
const Program kMeet = {{Kind::kMeet}};

const Scenario kEachItsBucket = {"EachItsBucket",
                                 [](const Kit&, int n) { return std::vector<Process>(2, {n * kA + kEnd, n * kB}); }};
const Scenario kThreeRanks = {"ThreeRanks",
                              [](const Kit&, int) { return std::vector<Process>(3, {2 * kA + kEnd, 2 * kB}); }};
const Scenario kOneThreadEndsEarly = {"OneThreadEndsEarly", [](const Kit&, int n) {
                                        return std::vector<Process>{{n * kA + kEnd, kB}, {n * kA + kEnd, n * kB}};
                                      }};
// The threads meet first: a flush refuses round 0 of a bucket that no thread of its rank has come to.
const Scenario kOneThreadFlushes = {"OneThreadFlushes", [](const Kit&, int n) {
                                      const Program flushes = kA + kMeet + kFlush + (n - 1) * kA + kEnd;
                                      return std::vector<Process>(2, {flushes, kB + kMeet + (n - 1) * kB});
                                    }};
const Scenario kOneRankFlushes = {"OneRankFlushes", [](const Kit&, int n) {
                                    const Program flushes = kA + kMeet + kFlush + (n - 1) * kA + kEnd;
                                    return std::vector<Process>{{flushes, kB + kMeet + (n - 1) * kB},
                                                                {n * kA + kEnd, n * kB}};
                                  }};
const Scenario kOneThreadIsParked = {"OneThreadIsParked", [](const Kit&, int n) {
                                       const Program parks = kA + kForeign + (n - 1) * kA + kEnd;
                                       return std::vector<Process>{{parks, n * kB}, {n * kA + kForeign + kEnd, n * kB}};
                                     }};
// The first threads have two buckets, and take them in opposite order.
const Scenario kThreadsInOppositeOrder = {"ThreadsInOppositeOrder",
                                          [](const Kit&, int n) {
                                            return std::vector<Process>{{kStep + (n - 1) * (kA + kB) + kEnd, n * kC},
                                                                        {kStep + (n - 1) * (kB + kA) + kEnd, n * kC}};
                                          },
                                          3};
// In each rank a bucket has lost its thread while the other rank waits there.
const Scenario kEndCrosswise = {
    "EndCrosswise", [](const Kit&, int n) { return std::vector<Process>{{n * kA + kEnd, kB}, {kA + kEnd, n * kB}}; }, 2,
    true};
// The threads of a rank wait for each other by queues, at different times in each rank.
const Scenario kQueues = {"Queues",
                          [](const Kit&, int n) {
                            return std::vector<Process>{{(n - 1) * kA + kMeet + kA + kEnd, kB + kMeet + (n - 1) * kB},
                                                        {kA + kMeet + (n - 1) * kA + kEnd, (n - 1) * kB + kMeet + kB}};
                          },
                          2, true, true};
const Scenario kHandedOver = {"BucketsAreHandedOver",
                              [](const Kit&, int n) {
                                return std::vector<Process>(
                                    2, {kA + kMeet + (n - 1) * kB + kEnd, kB + kMeet + (n - 1) * kA});
                              },
                              2, true, true};

// --- Jobs

struct NamedPolicy {
  std::string name;
  Policy policy;
};

NamedPolicy Quorum(const std::string& name, int quorum, Round max_staleness = 16) {
  return {name, test::Quorum(quorum, max_staleness)};
}
const NamedPolicy kSolo = Quorum("Solo", 1);
const NamedPolicy kSoloWithBound1 = Quorum("SoloWithBound1", 1, 1);
const NamedPolicy kMajority = Quorum("Majority", 2);  // of 3 ranks, so Quorum(2) too
const NamedPolicy kQuorum3 = Quorum("Quorum3", 3);

NamedPolicy Initiator(std::uint64_t seed) { return {"Initiator" + std::to_string(seed), RandomInitiator(seed)}; }
NamedPolicy Ready(int group_size) { return {"Ready" + std::to_string(group_size), test::Ready(group_size, 4)}; }
NamedPolicy Butterfly(const std::string& name, Round period, Round max_staleness = 16) {
  return {name, Pairs(period, 1, max_staleness)};
}
const NamedPolicy kButterfly = Butterfly("ButterflyAndFullRounds", 2);
const NamedPolicy kButterflyWithBound0 = Butterfly("ButterflyWithBound0", 0, 0);
NamedPolicy WithGrace(NamedPolicy named) { return named.name += "WithGrace", named.policy.grace = kLong, named; }

struct Case {
  std::string name;
  Job job;
};
std::ostream& operator<<(std::ostream& out, const Case& each) { return out << each.name; }

Case Make(const NamedPolicy& policy, const Scenario& scenario, int steps, const Kit& kit = kPlain) {
  Job job{policy.policy, scenario.processes(kit, steps)};
  job.family = kit.family;
  job.buckets = scenario.buckets;
  job.silence = scenario.silence;
  job.queues = scenario.queues;
  job.never_sums = scenario.never_sums;
  return {policy.name + "_" + scenario.name, job};
}
Case Family(const NamedPolicy& policy, const Scenario& scenario, int steps) {
  return Make(policy, scenario, steps, kFamily);
}
Case EndsLate(Case each) {
  each.name += "_EndsLate";
  each.job.late_ends = true;
  return each;
}
Case WithTime(Case each) {
  each.name += "_WithTime";
  each.job.clock = true;
  return each;
}

using Cases = std::vector<Case>;

Cases Gradients() {
  Cases cases;
  for (NamedPolicy policy : {kSolo, kMajority, kQuorum3, Initiator(1), Initiator(2)}) {
    const std::string name = policy.name;
    for (const Round bound : {0, 1, 16}) {
      policy.name = name + "_Bound" + std::to_string(bound);
      policy.policy.max_staleness = bound;
      for (const Scenario& scenario : {kTogether, kOppositeOrder, kOppositeOrderOfTwo, kLeavesEarly, kGoesOnAlone,
                                       kParked, kJoinsEarly, kDelivers, kFlushOnce})
        cases.push_back(Make(policy, scenario, kSteps));
    }
  }
  return cases;
}

// What only some jobs have: ends of rounds that come late, time, requests for full rounds, sets of one rank.
Cases Extras() {
  Cases cases = {
      Make(kSolo, kClears, 2),
      Make(kSoloWithBound1, kClears, kSteps),
      Make(kMajority, kClears, kSteps),
      Make(kQuorum3, kClears, 2),
      Make(kQuorum3, kMeets, kSteps),
      WithTime(Make(kQuorum3, kMeets, 2)),
      EndsLate(Make(kQuorum3, kMeets, 2)),
      EndsLate(Make(kSolo, kTogether, 2)),
      EndsLate(Make(kMajority, kTogether, kSteps)),
      EndsLate(Make(kSolo, kDelivers, 2)),
      EndsLate(Make(kSolo, kClears, 2)),
      EndsLate(Make(Ready(2), kTogether, 2)),
      EndsLate(Make(Ready(2), kFlushOnce, 2)),
      EndsLate(Make(kButterfly, kTogether, 2)),
      EndsLate(Make(kButterfly, kFlushOnce, 2)),
      EndsLate(Make(kButterflyWithBound0, kClears, 2)),
      WithTime(Make(WithGrace(kSolo), kTogether, kSteps)),
      WithTime(Make(WithGrace(kMajority), kTogether, kSteps)),
      WithTime(Make(WithGrace(kMajority), kOppositeOrder, 2)),
      WithTime(Make(kMajority, kAbandons, 2)),
      WithTime(Make(kQuorum3, kAbandons, 2)),
      WithTime(Make(kMajority, kFlushOnce, 2)),
      WithTime(Make(kQuorum3, kLeavesEarly, 2)),
      WithTime(Make(kMajority, kOppositeOrder, 2)),
      EndsLate(Make(kSolo, kAlone, kSteps)),
  };
  for (const Scenario& scenario : {kOppositeOrder, kFlushOnce, kLeavesEarly, kJoinsEarly, kParked})
    cases.push_back(EndsLate(Make(kMajority, scenario, 2)));
  return cases;
}

// Models of a schedule's groups, which are kept and sent again, or of the first ranks that are ready.
Cases Groups() {
  Cases cases;
  for (const NamedPolicy& policy :
       {Ready(2), Ready(3), kButterfly, kButterflyWithBound0, Butterfly("ButterflyWithBound1", 0, 1)})
    for (const Scenario& scenario : {kTogether, kOppositeOrder, kOppositeOrderOfTwo, kLeavesEarly, kGoesOnAlone,
                                     kParked, kJoinsEarly, kFlushOnce, kClears, kAlone})
      cases.push_back(Make(policy, scenario, kSteps));
  return cases;
}

Cases Families() {
  Cases cases;
  for (const int quorum : {1, 2, 3}) {
    for (const Round bound : {1, 16}) {
      const auto policy = Quorum("Quorum" + std::to_string(quorum) + "_Bound" + std::to_string(bound), quorum, bound);
      const auto add = [&](const Scenario& scenario, int steps) { cases.push_back(Family(policy, scenario, steps)); };
      // Solo has 16 million states with 3 steps, which were explored once.
      for (const Scenario& scenario :
           {kTogether, kLeavesEarly, kGoesOnAlone, kParked, kParkedInStep, kJoinsEarly, kFlushOnce})
        add(scenario, quorum == 1 && bound > 1 ? 2 : kSteps);
      for (const Scenario& scenario : {kOppositeOrder, kDelivers, kClears, kJoinsFirst, kJoinsTwice, kJoinsAndEnds})
        add(scenario, quorum == 1 ? 2 : kSteps);
    }
  }
  return cases;
}

// Of Solo() with the other scenarios there are 2 million states, which were explored once.
Cases FamiliesThatEndLate() {
  Cases cases;
  for (const Scenario& scenario : {kLeavesEarly, kGoesOnAlone, kParked, kJoinsEarly, kFlushOnce, kClears})
    for (const NamedPolicy& policy : {kSoloWithBound1, kMajority})
      cases.push_back(EndsLate(Family(policy, scenario, 2)));
  for (const Scenario& scenario : {kTogether, kOppositeOrder, kDelivers, kJoinsFirst, kJoinsTwice})
    cases.push_back(EndsLate(Family(kMajority, scenario, 2)));
  return cases;
}

Cases Threads() {
  Cases cases;
  for (const Scenario& scenario : {kEachItsBucket, kThreeRanks, kOneThreadEndsEarly, kOneThreadFlushes, kOneRankFlushes,
                                   kOneThreadIsParked, kThreadsInOppositeOrder, kEndCrosswise, kQueues, kHandedOver}) {
    cases.push_back(Make(kSoloWithBound1, scenario, kSteps));
    for (const NamedPolicy& policy : {kSolo, Quorum("Everybody", 3)}) {
      cases.push_back(Make(policy, scenario, kSteps));
      cases.push_back(EndsLate(Make(policy, scenario, 2)));
    }
  }
  return cases;
}

// --- The tests

// What the explorations of a suite must have seen together; otherwise it does not show what it is there for.
const std::map<std::string, std::vector<std::size_t Coverage::*>> kMustSee = {
    {"Gradients",
     {&Coverage::on_time, &Coverage::late, &Coverage::while_running, &Coverage::slipped, &Coverage::pending_delivered}},
    {"Extras", {&Coverage::full_requests, &Coverage::late_ends, &Coverage::abandoned}},
    {"Groups", {&Coverage::late, &Coverage::left_out, &Coverage::sent_again, &Coverage::slipped}},
    {"Families",
     {&Coverage::late, &Coverage::parted, &Coverage::held, &Coverage::drained, &Coverage::kept,
      &Coverage::taken_meanwhile}},
    {"FamiliesThatEndLate", {&Coverage::late_ends, &Coverage::parted, &Coverage::drained}},
    {"Threads", {&Coverage::said_of_some}},
};

class ExplorerTest : public testing::TestWithParam<Case> {
 protected:
  static void SetUpTestSuite() {
    coverage_ = {};
    states_ = ends_ = 0;
  }
  static void TearDownTestSuite() {
    std::printf("explored %zu states, with %zu ends\n", states_, ends_);
    const auto* info = testing::UnitTest::GetInstance()->current_test_suite();
    if (info->test_to_run_count() < info->total_test_count()) return;  // a filter on the command line
    const std::string name = info->name();
    const std::string suite = name.substr(0, name.find('/'));
    for (const auto counter : kMustSee.at(suite)) EXPECT_GT(coverage_.*counter, 0u);
    if (suite != "Gradients") return;
    EXPECT_THAT(coverage_.closings, Each(Gt(0u)));
  }
  static inline Coverage coverage_;
  static inline std::size_t states_ = 0;
  static inline std::size_t ends_ = 0;
};

TEST_P(ExplorerTest, KeepsTheRules) {
  const Exploration result = Explore(World(GetParam().job, coverage_));
  EXPECT_EQ(result.violation, "") << result.trace;
  EXPECT_GT(result.ends, 0u);
  states_ += result.states;
  ends_ += result.ends;
  RecordProperty("states", std::to_string(result.states));
}

const auto kNameOfCase = [](const testing::TestParamInfo<Case>& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Gradients, ExplorerTest, testing::ValuesIn(Gradients()), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Extras, ExplorerTest, testing::ValuesIn(Extras()), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Groups, ExplorerTest, testing::ValuesIn(Groups()), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Families, ExplorerTest, testing::ValuesIn(Families()), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(FamiliesThatEndLate, ExplorerTest, testing::ValuesIn(FamiliesThatEndLate()), kNameOfCase);
INSTANTIATE_TEST_SUITE_P(Threads, ExplorerTest, testing::ValuesIn(Threads()), kNameOfCase);

}  // namespace
}  // namespace horovod_partial::test
