// Tells when a device has computed a contribution.
#pragma once

namespace horovod_partial {

// An event in the queue of a device, behind the work that computes a contribution. A framework queues work long before
// the device does it. When the event has come, this rank arrives. Until then nothing may touch the contribution.
class ReadyEvent {
 public:
  virtual ~ReadyEvent() = default;
  virtual bool Ready() const = 0;  // may be called by any thread; does not block
};

}  // namespace horovod_partial
