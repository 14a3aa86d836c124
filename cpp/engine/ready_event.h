// When a device has made what an arrival brings.
#pragma once

namespace horovod_partial {

// Stands behind what a framework has queued on a device. A framework's hooks run far ahead of the device; until the
// event is there the rank has not arrived, and nobody reads or writes the arrival's memory.
class ReadyEvent {
 public:
  virtual ~ReadyEvent() = default;
  virtual bool Ready() const = 0;  // any thread; does not block
};

}  // namespace horovod_partial
