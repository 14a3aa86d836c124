// Horovod's own collectives that are outstanding.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "attach/horovod.h"
#include "core/values/types.h"

namespace horovod_partial::attach {

// Finds those of one process set, without the background thread. That cannot look if another rank holds it up; any
// other thread can look by this. It does not wait for Horovod's queue lock, which Horovod holds while it runs
// callbacks: if the lock is taken, the last answer stands.
class Outstanding {
 public:
  explicit Outstanding(hvd::Controller& controller) : queue_(QueueAccess::Of(controller)) {}

  // Any thread. Returns the name of an outstanding collective that is not ours, or "" if there is none. It stays with
  // the same one while that is outstanding. A join comes before all others.
  std::string Find();
  // Call this before Horovod destroys the queue. The queue is not used afterwards. The caller may hold the queue's
  // lock.
  void Leave();

 private:
  QueueAccess& queue_;
  std::mutex mutex_;  // guards what follows; while it is held and left_ is false, the queue exists
  bool left_ = false;
  std::string found_;
};

// Watches one that is outstanding in any process set.
class OutstandingWatch {
 public:
  // Background thread, in each cycle: returns since when the one that is watched has been outstanding; kNever if none
  // is.
  Time Since(hvd::HorovodGlobalState& state, Time now);
  // Any thread: how often the one that is watched has become another one, or none.
  std::uint64_t changes() const { return changes_; }

 private:
  std::string name_;                       // empty: none is watched
  std::weak_ptr<hvd::OpContext> context_;  // of that collective; a barrier has none
  Time since_ = kNever;
  std::atomic<std::uint64_t> changes_{0};
};

}  // namespace horovod_partial::attach
