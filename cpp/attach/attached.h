// The Horovod libraries to which this process is attached.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "attach/horovod.h"
#include "recording/recorder.h"

namespace horovod_partial::attach {

struct Attached {
  hvd::Status (*enqueue)(std::shared_ptr<hvd::OpContext>, std::shared_ptr<hvd::Tensor>, std::shared_ptr<hvd::Tensor>,
                         hvd::ReadyEventList, std::string, const int, hvd::StatusCallback, hvd::ReduceOp, double,
                         double, std::int32_t) = nullptr;
  int (*is_initialized)() = nullptr;
  bool waits_are_told = false;
  // Horovod's background thread and the application's threads use these fields without a lock: they are atomic.
  std::atomic<hvd::HorovodGlobalState*> state{nullptr};  // set by the first handshake; its address never changes
  std::atomic<int> generation{0};                        // changes with each initialisation
  std::shared_ptr<recording::Recorder> recorder;         // of the last generation that shook hands; by std::atomic_load
};

// Both threads use it. Who holds its lock never waits for anything, and never takes the interpreter's lock.
class AttachedLibraries {
 public:
  // Adds a library, which `fill` describes, unless it is there. Nothing is added if `fill` throws.
  void Add(const std::string& path, const std::function<void(Attached&)>& fill);
  // Returns null if this library has not been attached. What it returns lives as long as the process.
  Attached* Find(const std::string& path) const;
  // Called by the hook of each new controller. Every initialisation makes one while Horovod still says that it is not
  // initialised, so the number grows. Process sets that are added afterwards do not change it. A Horovod that is down
  // may also count the initialisation of another Horovod in this process.
  void CountGeneration();

 private:
  mutable std::mutex mutex_;  // guards the map
  std::map<std::string, std::unique_ptr<Attached>> libraries_;
};

AttachedLibraries& LibrariesOfProcess();

}  // namespace horovod_partial::attach
