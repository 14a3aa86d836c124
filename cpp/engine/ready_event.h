// Tells when a device has computed a contribution.
#pragma once

namespace horovod_partial {

// An event in a device's queue, behind the work that a framework has put there. A framework's hooks run far ahead of
// the device. The rank arrives only when the event has come. Until then the contribution's memory must not be used.
class ReadyEvent {
 public:
  virtual ~ReadyEvent() = default;
  virtual bool Ready() const = 0;  // any thread; does not block
};

}  // namespace horovod_partial
