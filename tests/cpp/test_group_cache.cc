#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/groups/groups.h"

namespace horovod_partial {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(GroupCacheTest, TheLeastRecentlyUsedMakesWay) {
  GroupCache cache(4, 2);
  cache.Use({0, 1});
  cache.Use({0, 2});
  cache.Use({0, 1});
  EXPECT_THAT(cache.Use({0, 3}), ElementsAre(Members{0, 2}));
  EXPECT_THAT(cache.Use({0, 1}), IsEmpty()) << "it has stayed";
}

TEST(GroupCacheTest, EachRankHasRoomOfItsOwn) {
  GroupCache cache(6, 1);
  EXPECT_THAT(cache.Use({0, 1}), IsEmpty());
  EXPECT_THAT(cache.Use({2, 3}), IsEmpty());
  EXPECT_THAT(cache.Use({4, 5}), IsEmpty());
  EXPECT_THAT(cache.Use({2, 4}), ElementsAre(Members{2, 3}, Members{4, 5})) << "one for each of its members";
}

bool Has(const Members& group, Rank rank) { return std::find(group.begin(), group.end(), rank) != group.end(); }

// Said in the plainest words: a list, the least recently used first.
class Model {
 public:
  Model(int size, std::size_t capacity) : size_(size), capacity_(capacity) {}

  std::vector<Members> Use(const Members& group) {
    std::vector<Members> evicted;
    const auto known = std::find(used_.begin(), used_.end(), group);
    if (known != used_.end()) {
      used_.erase(known);
    } else {
      for (const Rank member : group) {
        if (LoadOf(member) < capacity_) continue;
        const auto oldest =
            std::find_if(used_.begin(), used_.end(), [&](const Members& other) { return Has(other, member); });
        evicted.push_back(*oldest);
        used_.erase(oldest);
      }
    }
    used_.push_back(group);
    return evicted;
  }
  std::size_t LoadOf(Rank rank) const {
    return static_cast<std::size_t>(
        std::count_if(used_.begin(), used_.end(), [&](const Members& group) { return Has(group, rank); }));
  }
  int size() const { return size_; }

 private:
  const int size_;
  const std::size_t capacity_;
  std::vector<Members> used_;
};

TEST(GroupCacheTest, DoesAsItsModel) {
  std::mt19937 random(1);
  const auto below = [&](int end) { return std::uniform_int_distribution<int>(0, end - 1)(random); };
  for (int run = 0; run < 100; ++run) {
    const int size = 1 + below(10);
    const auto capacity = static_cast<std::size_t>(1 + below(5));
    GroupCache cache(size, capacity);
    GroupCache other_rank(size, capacity);
    Model model(size, capacity);
    for (int use = 0; use < 200; ++use) {
      Members group;
      for (Rank rank = 0; rank < size; ++rank)
        if (below(2) == 0) group.push_back(rank);
      if (group.empty()) continue;
      const auto evicted = cache.Use(group);
      ASSERT_EQ(evicted, model.Use(group));
      ASSERT_EQ(other_rank.Use(group), evicted) << "the same on every rank";
      for (Rank rank = 0; rank < size; ++rank) ASSERT_LE(model.LoadOf(rank), capacity);
    }
  }
}

// --- All orders of rounds of few ranks. A rank makes, uses and frees a communicator by calls that end when all members
// of the group have come to the same call.

enum class Kind { kMake, kReduce, kFree };
using Call = std::pair<Kind, Members>;

// What one rank calls. It is as attach/group_communicators.cc has it.
class Caller {
 public:
  // `sees_all`: the cache sees the groups of all ranks, and not this rank's alone.
  Caller(Rank rank, int size, std::size_t capacity, bool sees_all)
      : rank_(rank), size_(size), sees_all_(sees_all), cache_(size, capacity) {}

  void Use(const Partition& partition) {
    for (const Members& group : GroupsOf(partition)) {
      if (!sees_all_ && !Has(group, rank_)) continue;
      for (const Members& evicted : cache_.Use(group))
        if (made_.erase(evicted) > 0) calls.emplace_back(Kind::kFree, evicted);
    }
    const Members members = GroupOf(partition, rank_, size_);
    if (members.size() < 2) return;
    if (made_.insert(members).second) calls.emplace_back(Kind::kMake, members);
    calls.emplace_back(Kind::kReduce, members);
  }
  std::size_t made() const { return made_.size(); }

  std::deque<Call> calls;  // not ended yet

 private:
  const Rank rank_;
  const int size_;
  const bool sees_all_;
  GroupCache cache_;
  std::set<Members> made_;
};

// Ends all calls that can end. In which order they do makes no difference, because a rank makes one after the other.
void EndCalls(std::deque<Caller>& ranks) {
  for (bool ended = true; ended;) {
    ended = false;
    for (const Caller& caller : ranks) {
      if (caller.calls.empty()) continue;
      const Call call = caller.calls.front();
      const auto waits = [&](Rank rank) {
        return !ranks[Index(rank)].calls.empty() && ranks[Index(rank)].calls.front() == call;
      };
      if (!std::all_of(call.second.begin(), call.second.end(), waits)) continue;
      for (const Rank rank : call.second) ranks[Index(rank)].calls.pop_front();
      ended = true;
    }
  }
}

// Adds to `partitions` all that begin with `first` and have a group of two or more. Ranks may be in no group.
void Complete(const Partition& first, int size, std::vector<Partition>& partitions) {
  if (first.size() == static_cast<std::size_t>(size)) {
    const auto groups = GroupsOf(first);
    const auto reduces = [](const Members& group) { return group.size() > 1; };
    if (std::any_of(groups.begin(), groups.end(), reduces)) partitions.push_back(first);
    return;
  }
  const int groups = 1 + *std::max_element(first.begin(), first.end());
  for (int group = kNoGroup; group <= groups; ++group) {
    Partition longer = first;
    longer.push_back(group);
    Complete(longer, size, partitions);
  }
}

// In how many of all sequences of so many rounds some rank waits for ever.
int Hangs(int size, int rounds, std::size_t capacity, bool sees_all) {
  std::vector<Partition> partitions;
  for (const int first : {kNoGroup, 0}) Complete({first}, size, partitions);
  int hangs = 0;
  std::vector<std::size_t> sequence(static_cast<std::size_t>(rounds), 0);
  while (true) {
    std::deque<Caller> ranks;
    for (Rank rank = 0; rank < size; ++rank) ranks.emplace_back(rank, size, capacity, sees_all);
    for (const std::size_t number : sequence) {
      for (Caller& caller : ranks) caller.Use(partitions[number]);
      EndCalls(ranks);
    }
    const auto in_time = [](const Caller& caller) { return caller.calls.empty(); };
    hangs += std::all_of(ranks.begin(), ranks.end(), in_time) ? 0 : 1;
    for (const Caller& caller : ranks) EXPECT_LE(caller.made(), capacity);
    auto digit = sequence.begin();
    while (digit != sequence.end() && ++*digit == partitions.size()) *digit++ = 0;
    if (digit == sequence.end()) return hangs;
  }
}

TEST(GroupCacheTest, NoOrderOfRoundsHangs) {
  for (const auto& [size, rounds] : {std::pair(3, 5), std::pair(4, 3)})
    for (const std::size_t capacity : {1, 2}) EXPECT_EQ(Hangs(size, rounds, capacity, true), 0);
}

TEST(GroupCacheTest, RanksThatSeeTheirOwnGroupsAloneHang) { EXPECT_GT(Hangs(3, 3, 1, false), 0); }

}  // namespace
}  // namespace horovod_partial
