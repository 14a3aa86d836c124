// Finds Horovod's own collectives that are outstanding in a process set, without the background thread.
#pragma once

#include <mutex>
#include <string>

#include "attach/horovod.h"

namespace horovod_partial::attach {

// The background thread cannot look if another rank holds it up; any other thread can look by this. It does not wait
// for Horovod's queue lock, which Horovod holds while it runs callbacks: if the lock is taken, the last answer stands.
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

}  // namespace horovod_partial::attach
