// The Horovod libraries to which this process is attached.
#pragma once

#include <atomic>
#include <memory>
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
  // Horovod's background thread and the application's threads use `state`, `generation` and `recorder` without a lock.
  std::atomic<hvd::HorovodGlobalState*> state{nullptr};  // Horovod's state: null until the first handshake, then fixed
  std::atomic<int> generation{0};                        // differs after each hvd.init(), which adds 1 or more
  // The recorder that was made at the last handshake, or null. Used only by std::atomic_load and std::atomic_store.
  std::shared_ptr<recording::Recorder> recorder;

  // Returns `recorder`. Horovod may have shut down since.
  std::shared_ptr<recording::Recorder> LastRecorder() const;
};

// Attaches to a Horovod library: makes it call our functions in place of some of its own. A second call for the library
// only returns it. The returned object lives as long as the process. `waits_are_told`: true if Python code reports
// waits for Horovod's collectives (ForeignWait, Polled). Any thread may call this. If it throws, nothing is attached.
Attached& Attach(const std::string& library_path, bool waits_are_told);

// Called when a Horovod library has initialised a controller. Adds 1 to the `generation` of each library that is not
// yet initialised. This counts each hvd.init(), because a library is initialised only after its controllers. Process
// sets that are added later are not counted. A library that is down may count the hvd.init() of another library, too.
void CountGeneration();

}  // namespace horovod_partial::attach
