#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/groups/ready_groups.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::IsEmpty;

// Whether these groups connect the ranks that count.
bool Connect(const std::vector<Members>& groups, const std::vector<bool>& active) {
  std::vector<std::size_t> part(active.size());
  std::iota(part.begin(), part.end(), 0u);
  for (const Members& group : groups) {
    for (const Rank rank : group) {
      const std::size_t old = part[Index(rank)];
      std::replace(part.begin(), part.end(), old, std::size_t{part[Index(group[0])]});
    }
  }
  std::set<std::size_t> parts;
  for (std::size_t rank = 0; rank < active.size(); ++rank)
    if (active[rank]) parts.insert(part[rank]);
  return parts.size() <= 1;
}

double Spread(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end()) - *std::min_element(values.begin(), values.end());
}

// Workers that compute, come, and go on with their group; nothing takes time but computing and waiting.
class Workers {
 public:
  struct Formed {
    Time time;
    Members group;
    Time longest_wait{0};  // of its members
  };

  // `compute` tells how long a rank's next step takes. A connectivity rule only if there is a window.
  Workers(int size, int group_size, int window, std::function<Time(Rank)> compute)
      : size_(size),
        group_size_(Index(std::min(group_size, size))),
        groups_(size, group_size, window),
        compute_(std::move(compute)),
        active_(Index(size), true) {
    for (Rank rank = 0; rank < size; ++rank) Compute(rank, Time(0));
  }

  void Run(Time until) {
    for (;;) {
      Time next = groups_.hold_until();
      for (Rank rank = 0; rank < size_; ++rank)
        if (!IsWaiting(rank)) next = std::min(next, ready_[Index(rank)]);
      if (next > until) return;
      now_ = next;
      // Who is ready at the same time comes in the order of the ranks.
      for (Rank rank = 0; rank < size_; ++rank) {
        if (IsWaiting(rank) || ready_[Index(rank)] > now_) continue;
        const Time step = now_ - std::exchange(came_[Index(rank)], now_);
        waiting_.push_back({rank, now_ + step});
      }
      Form();
    }
  }

  const std::vector<Formed>& formed() const { return formed_; }
  const ReadyGroups& groups() const { return groups_; }
  std::size_t waiting() const { return waiting_.size(); }

  std::vector<Members> Last(std::size_t count, std::size_t end) const {
    std::vector<Members> groups;
    for (std::size_t i = end - std::min(end, count); i < end; ++i) groups.push_back(formed_[i].group);
    return groups;
  }
  const std::vector<bool>& active() const { return active_; }

 private:
  bool IsWaiting(Rank rank) const {
    return std::any_of(waiting_.begin(), waiting_.end(), [rank](const auto& other) { return other.rank == rank; });
  }
  void Compute(Rank rank, Time from) { ready_[Index(rank)] = from + compute_(rank); }

  // What E1 demands of every decision.
  void Form() {
    const auto before = waiting_;
    const auto groups = groups_.Form(waiting_, active_, now_);
    for (const Members& group : groups) {
      EXPECT_EQ(group.size(), group_size_);
      EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
      Formed formed{now_, group};
      for (const Rank rank : group) {
        const auto at =
            std::find_if(waiting_.begin(), waiting_.end(), [rank](const auto& other) { return other.rank == rank; });
        ASSERT_NE(at, waiting_.end()) << "rank " << rank << " has not come, or is in two groups";
        formed.longest_wait = std::max(formed.longest_wait, now_ - came_[Index(rank)]);
        waiting_.erase(at);
        Compute(rank, now_);
      }
      formed_.push_back(formed);
    }
    if (waiting_.size() >= group_size_) {
      EXPECT_GT(groups_.hold_until(), now_) << "ranks wait, and nothing will ever wake them";
      EXPECT_LE(groups_.hold_until(), waiting_[0].hold_until);
    } else {
      EXPECT_EQ(groups_.hold_until(), kNever);
    }
  }

  const int size_;
  const std::size_t group_size_;
  ReadyGroups groups_;
  const std::function<Time(Rank)> compute_;
  const std::vector<bool> active_;
  Time now_{0};
  std::vector<Time> ready_ = std::vector<Time>(Index(size_));
  std::vector<Time> came_ = std::vector<Time>(Index(size_));
  std::vector<ReadyGroups::Candidate> waiting_;
  std::vector<Formed> formed_;
};

std::vector<ReadyGroups::Candidate> Candidates(const std::vector<Rank>& ranks, Time hold_until = kNever) {
  std::vector<ReadyGroups::Candidate> candidates;
  for (const Rank rank : ranks) candidates.push_back({rank, hold_until});
  return candidates;
}

// --- Who is grouped (E1)

TEST(ReadyGroupsTest, FirstComeFirstServed) {
  ReadyGroups groups(6, 2, 12);
  EXPECT_THAT(groups.Form(Candidates({4, 1, 3, 0, 5}), std::vector<bool>(6, true), Time(0)),
              ElementsAre(Members{1, 4}, Members{0, 3}));
}

TEST(ReadyGroupsTest, AGroupOfOneIsNeverHeld) {
  ReadyGroups groups(3, 1, 6);
  for (int i = 0; i < 20; ++i)
    EXPECT_THAT(groups.Form(Candidates({0}), std::vector<bool>(3, true), Time(0)), ElementsAre(Members{0})) << i;
}

TEST(ReadyGroupsTest, EveryReadyWorkerIsGroupedOnce) {
  std::mt19937 random(1);
  const auto below = [&](int end) { return std::uniform_int_distribution<int>(0, end - 1)(random); };
  for (int run = 0; run < 300; ++run) {
    const int size = 1 + below(12);
    const int group_size = 1 + below(size);
    const int window = 1 + below(2 * size);
    std::vector<Time> speed;
    for (Rank rank = 0; rank < size; ++rank) speed.push_back(1ms * (1 + below(20)));
    const bool random_steps = below(2) == 0;
    SCOPED_TRACE(testing::Message() << "groups of " << group_size << " of " << size << ", window " << window);
    Workers workers(size, group_size, window, [&](Rank rank) {
      return random_steps ? speed[Index(rank)] * (1 + below(10)) / 5 + 1us : speed[Index(rank)];
    });
    workers.Run(1s);
    EXPECT_FALSE(workers.formed().empty());
    // No rank waits for ever: a group forms whenever enough are there, at the latest after a step.
    for (const auto& formed : workers.formed()) EXPECT_LT(formed.longest_wait, 500ms);
    if (testing::Test::HasFailure()) return;
  }
}

// --- Mixing (E2): the second largest eigenvalue of the mean of W

class MixingTest : public testing::Test {
 protected:
  // Of three ranks' groups: by power iteration beside the constant vector, which has the eigenvalue 1.
  static double SecondEigenvalue(const std::vector<Workers::Formed>& formed) {
    double mean[3][3] = {};
    for (const auto& each : formed) {
      for (Rank i = 0; i < 3; ++i) {
        const bool in_group = std::count(each.group.begin(), each.group.end(), i) > 0;
        for (Rank j = 0; j < 3; ++j) {
          const bool both = in_group && std::count(each.group.begin(), each.group.end(), j) > 0;
          mean[i][j] += (both ? 0.5 : i == j && !in_group ? 1.0 : 0.0) / static_cast<double>(formed.size());
        }
      }
    }
    std::vector<double> vector = {1, 0.3, -1.3};
    double eigenvalue = 0;
    for (int i = 0; i < 200; ++i) {
      std::vector<double> next(3);
      for (int row = 0; row < 3; ++row)
        for (int column = 0; column < 3; ++column) next[Index(row)] += mean[row][column] * vector[Index(column)];
      eigenvalue = std::sqrt(std::inner_product(next.begin(), next.end(), next.begin(), 0.0));
      const double constant = std::accumulate(next.begin(), next.end(), 0.0) / 3;
      for (double& value : next) value = (value - constant) / eigenvalue;
      vector = next;
    }
    return eigenvalue;
  }
  std::mt19937 random_{1};
};

// Steps of random length, which forget how long they have lasted: so any two may be the next.
TEST_F(MixingTest, OfThreeRanksOfEqualSpeed) {
  Workers workers(3, 2, 6, [&](Rank) {
    return Time(1 + static_cast<int>(1e6 * std::exponential_distribution<double>()(random_)));
  });
  workers.Run(20s);
  ASSERT_GT(workers.formed().size(), 10000u);
  EXPECT_NEAR(SecondEigenvalue(workers.formed()), 0.5, 0.02);
}

// Rank 2 takes two steps' time, and comes just before one of the others, either of them: 12, 13, 12, 23.
TEST_F(MixingTest, OfThreeRanksOneAtHalfSpeed) {
  Workers workers(3, 2, 6, [&](Rank rank) {
    const int jitter = std::uniform_int_distribution<int>(100, 200)(random_);
    return rank == 2 ? 2ms - 1us : 1ms + Time(jitter);
  });
  workers.Run(20s);
  std::vector<Workers::Formed> formed = workers.formed();
  ASSERT_GT(formed.size(), 10000u);
  EXPECT_NEAR(SecondEigenvalue(formed), 0.625, 0.02);
}

// --- No cliques (E3)

class IsolationTest : public testing::TestWithParam<int> {};

// The spread of values that start with the ranks' numbers, and are averaged in each group.
double SpreadAfter(const std::vector<Workers::Formed>& formed, int size) {
  std::vector<double> values(Index(size));
  std::iota(values.begin(), values.end(), 0.0);
  for (const auto& each : formed) {
    double sum = 0;
    for (const Rank rank : each.group) sum += values[Index(rank)];
    for (const Rank rank : each.group) values[Index(rank)] = sum / static_cast<double>(each.group.size());
  }
  return Spread(values);
}

void ExpectConnectedAtEveryCheck(const Workers& workers, std::size_t window) {
  for (std::size_t end = window; end <= workers.formed().size(); ++end)
    ASSERT_TRUE(Connect(workers.Last(window, end), workers.active())) << "after " << end << " groups";
  EXPECT_EQ(workers.groups().unconnected(), 0);
}

TEST_P(IsolationTest, RanksInLockstepFindNewPartners) {
  const int window = GetParam();
  Workers workers(4, 2, window, [](Rank) { return 10ms; });
  workers.Run(1s);
  EXPECT_GE(workers.formed().size(), window == 3 ? 100u : 190u) << "and nobody waits for it";
  ExpectConnectedAtEveryCheck(workers, Index(window));
  EXPECT_LT(SpreadAfter(workers.formed(), 4), 1e-6);
}

// Two come always a little earlier than the other two, so that a pair is ready before there is a choice.
TEST_P(IsolationTest, SoDoPairsThatComeOneAfterTheOther) {
  const int window = GetParam();
  bool started[4] = {};
  Workers workers(4, 2, window, [&](Rank rank) {
    const bool first = !std::exchange(started[rank], true);
    return first && rank >= 2 ? 12ms : 10ms;
  });
  workers.Run(2s);
  ExpectConnectedAtEveryCheck(workers, Index(window));
  EXPECT_GE(workers.formed().size(), 300u) << "the holds do not add up";
  EXPECT_LT(SpreadAfter(workers.formed(), 4), 1e-6);
}

// E5: without imbalance next to nothing is lost, in lockstep or with a little noise in the steps.
TEST(IsolationTest, RanksOfEqualSpeedLoseNextToNothing) {
  std::mt19937 random(1);
  for (const bool noisy : {false, true}) {
    Workers workers(8, 4, 16, [&](Rank) { return 10ms + Time(noisy ? static_cast<int>(random() % 100'000) : 0); });
    workers.Run(2s);
    EXPECT_GE(workers.formed().size(), 380u) << "of 400" << (noisy ? ", with noise" : "");
    EXPECT_LT(workers.groups().unconnected(), 40) << (noisy ? "with noise" : "");
  }
}

// A window of 3 is the least that can connect 4 ranks in pairs.
INSTANTIATE_TEST_SUITE_P(Windows, IsolationTest, testing::Values(3, 4, 8));

TEST(IsolationTest, WindowsThatCannotConnectAreCountedAndHoldNobodyForLong) {
  Workers workers(4, 2, 2, [](Rank) { return 10ms; });
  workers.Run(1s);
  EXPECT_GE(workers.formed().size(), 150u);
  EXPECT_EQ(workers.groups().unconnected(), static_cast<std::int64_t>(workers.formed().size()) - 1);
}

// --- Holds

class HoldTest : public testing::Test {
 protected:
  // Ranks 0 and 1 have been in a group; 2 and 3 are not connected with them.
  HoldTest() { groups_.Add({0, 1}, active_); }
  std::vector<Members> Form(const std::vector<Rank>& ranks, Time hold_until, Time now) {
    return groups_.Form(Candidates(ranks, hold_until), active_, now);
  }
  std::vector<bool> active_ = std::vector<bool>(4, true);
  ReadyGroups groups_{4, 2, 8};
};

TEST_F(HoldTest, ThoseWhoAreConnectedWaitForAnother) {
  EXPECT_THAT(Form({1, 0}, 10ms, 5ms), IsEmpty());
  EXPECT_EQ(groups_.hold_until(), 10ms);
  EXPECT_THAT(Form({1, 0, 3}, 10ms, 6ms), ElementsAre(Members{1, 3})) << "the first of them goes with it";
  EXPECT_EQ(groups_.hold_until(), kNever);
}

TEST_F(HoldTest, TheFirstOnesTimeCounts) {
  EXPECT_THAT(groups_.Form({{1, 10ms}, {0, 20ms}}, active_, 5ms), IsEmpty());
  EXPECT_EQ(groups_.hold_until(), 10ms);
  EXPECT_THAT(groups_.Form({{1, 10ms}, {0, 20ms}}, active_, 10ms), ElementsAre(Members{0, 1}));
}

TEST_F(HoldTest, IsNotRepeatedAfterItWasInVain) {
  EXPECT_THAT(Form({0, 1}, 10ms, 5ms), IsEmpty());
  EXPECT_THAT(Form({0, 1}, 10ms, 10ms), ElementsAre(Members{0, 1}));
  for (int i = 0; i < 20; ++i) EXPECT_THAT(Form({1, 0}, 1h, 20ms), ElementsAre(Members{0, 1})) << i;
  EXPECT_EQ(groups_.hold_until(), kNever);
}

TEST_F(HoldTest, OfAnotherPartIsAnother) {
  Form({0, 1}, 10ms, 10ms);  // in vain
  groups_.Add({2, 3}, active_);
  EXPECT_THAT(Form({2, 3}, 20ms, 11ms), IsEmpty());
  EXPECT_EQ(groups_.hold_until(), 20ms);
}

TEST_F(HoldTest, IsPossibleAgainOnceAllHaveBeenConnected) {
  Form({0, 1}, 10ms, 10ms);  // in vain
  groups_.Add({1, 2}, active_);
  groups_.Add({2, 3}, active_);
  for (int i = 0; i < 8; ++i) EXPECT_THAT(Form({0, 1}, 30ms, 20ms + 1us * i).size(), testing::Le(1u));
  EXPECT_THAT(Form({0, 1}, 30ms, 21ms), IsEmpty()) << "the window has forgotten the connection";
}

TEST_F(HoldTest, NobodyWaitsForRanksThatAreOutOfTraining) {
  active_ = {true, true, false, false};
  EXPECT_THAT(Form({0, 1}, 1h, 0ms), ElementsAre(Members{0, 1}));
}

TEST_F(HoldTest, ANewCallForgetsTheLastOnesHold) {
  EXPECT_THAT(Form({0, 1}, 10ms, 5ms), IsEmpty());
  EXPECT_THAT(Form({0}, 10ms, 6ms), IsEmpty());
  EXPECT_EQ(groups_.hold_until(), kNever);
}

TEST(SlowRankTest, DoesNotHoldTheOthersForLong) {
  const auto run = [](Time slow_step) {
    Workers workers(4, 2, 8, [=](Rank rank) { return rank == 3 ? slow_step : 10ms + rank * 100us; });
    workers.Run(20s);
    return workers.formed().size();
  };
  // The other three alone: 3 of 2 ranks, in 10 ms at most 1.5 groups.
  Workers alone(3, 2, 6, [](Rank rank) { return 10ms + rank * 100us; });
  alone.Run(20s);
  for (const Time slow_step : {Time(1s), Time(5s), Time(1h)})
    EXPECT_GE(static_cast<double>(run(slow_step)), 0.9 * static_cast<double>(alone.formed().size()))
        << slow_step.count();
}

}  // namespace
}  // namespace horovod_partial
