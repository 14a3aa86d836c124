// Finds Horovod's own collectives (of hvd.allreduce, say) that have not ended, because this rank may wait for one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "attach/horovod.h"
#include "core/values/types.h"
#include "engine/possible_arrivals.h"

namespace horovod_partial::attach {

// Finds Horovod's own collectives that are outstanding in one process set. Any thread may ask, so a wait is seen even
// while another rank holds up the background thread. Find does not block on the lock of Horovod's tensor queue, because
// Horovod holds that lock while it runs callbacks. If the lock is taken, Find returns its last answer again.
class Outstanding {
 public:
  explicit Outstanding(hvd::Controller& controller) : queue_(QueueAccess::Of(controller)) {}

  // Returns the name of an outstanding collective of Horovod's own, or an empty text. The answer stays the same until
  // that collective has ended, or a join begins. Any thread may call this.
  std::string Find();
  // Call this before Horovod destroys its tensor queue, which Find then does not use. The queue's lock may be held.
  void Leave();

 private:
  QueueAccess& queue_;
  std::mutex mutex_;  // guards `left_` and `found_`; while it is held and `left_` is false, Horovod's queue exists
  bool left_ = false;
  std::string found_;
};

// Measures how long a collective of Horovod's own is outstanding, because a rank that waits long in one does not train.
// Watches one collective at a time, in any process set. When the watched collective has ended, watches another.
class OutstandingWatch {
 public:
  // Returns when the watched collective was first seen, or kNever if none is outstanding. The background thread must
  // call this in each cycle.
  Time Since(hvd::HorovodGlobalState& state, Time now);
  // Returns all collectives of Horovod's own that are outstanding in any process set. Background thread only.
  static std::vector<PossibleArrivals::Collective> All(hvd::HorovodGlobalState& state);
  // Returns how often the watched collective has changed, to another one or to none. If this number has changed, the
  // heartbeat monitor takes a wait for a new wait. Any thread may call this.
  std::uint64_t changes() const { return changes_; }

 private:
  std::string name_;                   // the name of the watched collective; empty if none is watched
  std::weak_ptr<const void> context_;  // a later collective of the name has another; null for a barrier
  Time since_ = kNever;
  std::atomic<std::uint64_t> changes_{0};
};

}  // namespace horovod_partial::attach
