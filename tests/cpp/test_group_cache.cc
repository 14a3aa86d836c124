#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
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
  static bool Has(const Members& group, Rank rank) {
    return std::find(group.begin(), group.end(), rank) != group.end();
  }

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

}  // namespace
}  // namespace horovod_partial
