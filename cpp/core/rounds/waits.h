// Which ranks wait for what, in words.
#pragma once

#include <string>
#include <vector>

#include "core/rounds/bucket_state.h"
#include "core/values/types.h"

namespace horovod_partial {

// Why all waits of ranks that wait for each other fail. `levels`: by rank.
std::string DescribeDeadlock(const std::vector<RankLevel>& levels, const BucketStates& buckets);

// Names the ranks that a round or a flush waits for: one line for each wait that began at `oldest` or before. Some rank
// has been in a flush, or has ended, since `flush_since`.
std::string DescribeWaits(const std::vector<RankLevel>& levels, const BucketStates& buckets, Time flush_since,
                          Time oldest);

}  // namespace horovod_partial
