// Texts that say which ranks wait for what.
#pragma once

#include <string>
#include <vector>

#include "core/rounds/bucket_state.h"
#include "core/values/types.h"

namespace horovod_partial {

// Returns the error text for ranks that all wait for each other. `levels` has an item for each rank.
std::string DescribeDeadlock(const std::vector<RankLevel>& levels, const BucketStates& buckets);

// Returns a text that names the ranks that rounds and flushes wait for, with a line for each wait that began at
// `oldest` or before. `flush_since` is when the first rank began to flush, or ended.
std::string DescribeWaits(const std::vector<RankLevel>& levels, const BucketStates& buckets, Time flush_since,
                          Time oldest);

}  // namespace horovod_partial
