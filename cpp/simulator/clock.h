// The times of cycles in simulated time.
#pragma once

#include "core/values/types.h"

namespace horovod_partial {

// Returns when an arrival that comes at `since` is negotiated. A cycle can begin at `first`, and further cycles follow
// at intervals of `cycle`. If `cycle` is 0, a cycle can begin at any time from `first` on.
inline Time NegotiatedAt(Time first, Time since, Time cycle) {
  if (since <= first) return first;
  return cycle == Time(0) ? since : first + (since - first + cycle - Time(1)) / cycle * cycle;
}

}  // namespace horovod_partial
