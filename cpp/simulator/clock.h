// Simulated time.
#pragma once

#include <chrono>

#include "core/types.h"

namespace horovod_partial {

inline Time FromSeconds(double seconds) {
  return std::chrono::duration_cast<Time>(std::chrono::duration<double>(seconds) +
                                          std::chrono::duration<double>(5e-10));
}

inline double ToSeconds(Time time) { return std::chrono::duration<double>(time).count(); }

// When that of `since` is negotiated, where a cycle can begin at `first` and others follow in the same rhythm. Without
// a cycle that is at once.
inline Time NegotiatedAt(Time first, Time since, Time cycle) {
  if (since <= first) return first;
  return cycle == Time(0) ? since : first + (since - first + cycle - Time(1)) / cycle * cycle;
}

}  // namespace horovod_partial
