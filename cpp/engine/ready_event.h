// Tells when a device has computed a contribution.
#pragma once

namespace horovod_partial {

// An event in the queue of a device, behind the work that a framework has put there. The framework is far ahead of the
// device. The rank arrives when the event has come; until then nothing may touch the contribution.
class ReadyEvent {
 public:
  virtual ~ReadyEvent() = default;
  virtual bool Ready() const = 0;  // may be called by any thread; does not block
};

}  // namespace horovod_partial
