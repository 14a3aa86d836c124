// Which ranks reduce together in a round.
#pragma once

#include <vector>

#include "core/types.h"

namespace horovod_partial {

constexpr int kNoGroup = -1;

// By rank: the number of its group, or kNoGroup. Empty: all ranks reduce together.
using Partition = std::vector<int>;
using Members = std::vector<Rank>;  // ascending

// The groups of a partition, by number; at least one rank in each.
std::vector<Members> GroupsOf(const Partition& partition);
// The group of one rank among `size`; empty if it has none.
Members GroupOf(const Partition& partition, Rank rank, int size);
// A rank's place among the members, of whom it is one.
int PlaceOf(const Members& members, Rank rank);
// The other way round: ranks that are in no group get kNoGroup.
Partition PartitionOf(const std::vector<Members>& groups, int size);

}  // namespace horovod_partial
