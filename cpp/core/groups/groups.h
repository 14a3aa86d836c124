// Divides the ranks of a process set into groups. Each group reduces by itself.
#pragma once

#include <vector>

#include "core/values/types.h"

namespace horovod_partial {

constexpr int kNoGroup = -1;

// A partition has for each rank the number of its group, or kNoGroup. If it is empty, all ranks reduce together.
using Partition = std::vector<int>;
using Members = std::vector<Rank>;  // the ranks of a group, in ascending order

// Returns the groups of a partition of the ranks, ordered by their numbers. A number without ranks gives no group.
std::vector<Members> GroupsOf(const Partition& partition);
// Returns the group of a rank among `size` ranks. The result is empty if the rank is in no group.
Members GroupOf(const Partition& partition, Rank rank, int size);
// Returns the index of a rank among the members of its group.
int PlaceOf(const Members& members, Rank rank);
// Returns for each of `size` ranks the number of its group in `groups`, or kNoGroup if it is in none.
Partition PartitionOf(const std::vector<Members>& groups, int size);

}  // namespace horovod_partial
