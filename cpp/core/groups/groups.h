// Divides the ranks of a process set into groups, and decides which groups keep a communicator.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <vector>

#include "core/values/types.h"

namespace horovod_partial {

constexpr int kNoGroup = -1;

// A partition has for each rank the number of its group, or kNoGroup. In an empty partition all ranks reduce together.
using Partition = std::vector<int>;
using Members = std::vector<Rank>;  // the ranks of a group, in ascending order

// Returns the groups of a partition of the ranks, ordered by their numbers. A number without ranks gives no group.
std::vector<Members> GroupsOf(const Partition& partition);
// Returns the members of the group that contains `rank`. If `partition` is empty, these are all ranks, 0 to `size` - 1.
// If the rank is in no group, the result is empty.
Members GroupOf(const Partition& partition, Rank rank, int size);
// Returns the index of a rank among the members of its group.
int PlaceOf(const Members& members, Rank rank);
// Returns for each of `size` ranks the number of its group in `groups`, or kNoGroup if the rank is in no group.
Partition PartitionOf(const std::vector<Members>& groups, int size);

// The groups that have a communicator. This cache is equal on all ranks, because each rank sees the groups of all
// rounds of the process set in one order. (If only one rank freed a communicator, the others would hang at its next
// use.) Each rank has room for `capacity` communicators. If a member of a new group has no room, that member's least
// recently used group is evicted on all ranks.
class GroupCache {
 public:
  GroupCache(int size, std::size_t capacity) : capacity_(capacity), load_(static_cast<std::size_t>(size)) {}

  // Marks a group of ranks as used. Returns the groups that must make room for it. The caller must free the
  // communicators of these groups before it makes a communicator for `group`.
  std::vector<Members> Use(const Members& group);

 private:
  const std::size_t capacity_;
  std::vector<std::size_t> load_;  // for each rank: the number of cached groups that contain the rank
  std::list<Members> order_;       // the cached groups; the least recently used group is first
  std::map<Members, std::list<Members>::iterator> at_;
};

}  // namespace horovod_partial
