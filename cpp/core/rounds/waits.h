// Texts that say which ranks wait for what.
#pragma once

#include <string>
#include <vector>

#include "core/rounds/bucket_state.h"
#include "core/values/types.h"

namespace horovod_partial {

// Returns the error text for ranks that all wait for each other. `levels` has an item for each rank.
std::string DescribeDeadlock(const std::vector<RankLevel>& levels, const BucketStates& buckets);

// Returns a text with a line for each wait that began at `oldest` or before: what waits, and for which ranks.
// `flush_since`: since when some rank has been in a flush or has ended; kNever if there is no such rank. `of_rounds`:
// true if the text tells of waits for rounds and updates.
std::string DescribeWaits(const std::vector<RankLevel>& levels, const BucketStates& buckets, Time flush_since,
                          Time oldest, bool of_rounds);

}  // namespace horovod_partial
