// Since when have threads of this process been waiting for rounds?
#pragma once

#include <mutex>

#include "core/types.h"

namespace horovod_partial {

// One for all process sets of a process: a rank that waits in one of them cannot arrive in the others. Any thread.
class WaitClock {
 public:
  void Enter(Time now) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (waiters_++ == 0) since_ = now;
  }
  void Leave() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--waiters_ == 0) since_ = kNever;
  }
  // When the first of the threads that wait now began, or kNever.
  Time Since() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return since_;
  }

 private:
  mutable std::mutex mutex_;
  int waiters_ = 0;
  Time since_ = kNever;
};

}  // namespace horovod_partial
