// Which ranks reduce together in a round.
#pragma once

#include <vector>

#include "core/values/types.h"

namespace horovod_partial {

constexpr int kNoGroup = -1;

// By rank: the number of its group, or kNoGroup. Empty: all ranks reduce together.
using Partition = std::vector<int>;
using Members = std::vector<Rank>;  // ascending

// The groups of a partition, by number; at least one rank in each.
std::vector<Members> GroupsOf(const Partition& partition);
// The group of one rank among `size`; empty if it has none.
Members GroupOf(const Partition& partition, Rank rank, int size);
// A rank's index among the members. The rank must be one of them.
int PlaceOf(const Members& members, Rank rank);
// The partition that has these groups. Ranks in no group get kNoGroup.
Partition PartitionOf(const std::vector<Members>& groups, int size);

}  // namespace horovod_partial
