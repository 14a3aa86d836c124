// Finds collectives of Horovod's own that are outstanding.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "attach/horovod.h"
#include "core/values/types.h"

namespace horovod_partial::attach {

// Finds outstanding collectives of one process set. Any thread may ask, so a wait can be seen even while another rank
// holds up the background thread. It does not wait for the lock of Horovod's queue, because Horovod holds that while it
// runs callbacks. If another thread has the lock, Find returns its last answer again.
class Outstanding {
 public:
  explicit Outstanding(hvd::Controller& controller) : queue_(QueueAccess::Of(controller)) {}

  // Returns the name of an outstanding collective of Horovod's own, or an empty text. While that collective is
  // outstanding, the name stays the same. A join comes before all other collectives. Any thread may call this.
  std::string Find();
  // Called before Horovod destroys the queue, which is not used afterwards. The caller may hold the queue's lock.
  void Leave();

 private:
  QueueAccess& queue_;
  std::mutex mutex_;  // guards the members below; while it is held and `left_` is false, the queue exists
  bool left_ = false;
  std::string found_;
};

// Notes since when a collective of Horovod's own has been outstanding: if for long, this rank is out of training.
// Watches one such collective at a time, in any process set.
class OutstandingWatch {
 public:
  // Returns since when the watched collective has been outstanding, or kNever. The background thread must call this in
  // each cycle.
  Time Since(hvd::HorovodGlobalState& state, Time now);
  // Returns how often the collective of Horovod that this rank waits for has changed, to another one or to none. Any
  // thread may call this.
  std::uint64_t changes() const { return changes_; }

 private:
  std::string name_;                       // the name of the watched collective; empty if none is watched
  std::weak_ptr<hvd::OpContext> context_;  // the context of the watched collective; a barrier has none
  Time since_ = kNever;
  std::atomic<std::uint64_t> changes_{0};
};

}  // namespace horovod_partial::attach
