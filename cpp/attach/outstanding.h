// Horovod's own collectives that are outstanding in a process set, for a thread beside the background one.
#pragma once

#include <mutex>
#include <string>

#include "attach/horovod.h"

namespace horovod_partial::attach {

// Where another rank holds the background thread up, nobody but this sees what the application asks for. It waits for
// no lock that may be held for long: Horovod calls back, and so runs anything, with its queue's lock held.
class Outstanding {
 public:
  explicit Outstanding(hvd::Controller& controller) : queue_(QueueAccess::Of(controller)) {}

  // Any thread: the name of one that is not ours, the same one again as long as it is there; "" if there is none. A
  // join is told before all others.
  std::string Find();
  // Horovod is about to give the queue up, and may hold its lock: it is not touched any more.
  void Leave();

 private:
  QueueAccess& queue_;
  std::mutex mutex_;  // guards what follows, and the queue's life
  bool left_ = false;
  std::string found_;
};

}  // namespace horovod_partial::attach
