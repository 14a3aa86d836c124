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
  std::atomic<hvd::HorovodGlobalState*> state{nullptr};  // set by the first handshake, and not changed again
  std::atomic<int> generation{0};                        // the present generation; each initialisation adds 1 or more
  std::shared_ptr<recording::Recorder> recorder;         // the last handshake's recorder; read by std::atomic_load
};

// For any thread. A thread that holds its lock never waits for anything, and never takes the interpreter's lock.
class AttachedLibraries {
 public:
  // Adds a library, unless it is there. `fill` sets the fields of the library. If `fill` throws, nothing is added.
  void Add(const std::string& path, const std::function<void(Attached&)>& fill);
  // Returns the library at a path, or null if it has not been added. The object lives as long as the process.
  Attached* Find(const std::string& path) const;
  // Called when Horovod has initialised a controller. Raises the generation of each library that is not initialised.
  // Each `init` makes a controller before Horovod counts as initialised, so each `init` is counted. Process sets that
  // are added later are not. A library that is down may also count the `init` of another library in this process.
  void CountGeneration();

 private:
  mutable std::mutex mutex_;  // guards the map
  std::map<std::string, std::unique_ptr<Attached>> libraries_;
};

AttachedLibraries& LibrariesOfProcess();

}  // namespace horovod_partial::attach
