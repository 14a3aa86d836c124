// The device that a bucket lies on, by Horovod's number for it. The only place that asks whether this build has any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/memory.h"
#include "engine/ready_event.h"

namespace horovod_partial::attach {

// Throws std::invalid_argument for a device where Horovod was built without it.
Memory& MemoryOf(int device);

// Memory of the host that a device can use too, though slowly: for a rank whose device has none left, or has failed,
// and whose zeros the others wait for.
Memory& SpareMemoryOf(int device);

// Where a rank works that has not shown it yet: Horovod's examples give each local rank a device of its own.
int DefaultDevice(int local_rank);

// Fetches what lies on a device; it is there on return.
void CopyToHost(int device, void* target, const void* source, std::size_t bytes);

// A framework's stream on a device. On the host, where nothing is queued, all is done at once. Any thread.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual int device() const = 0;

  // Queued behind all that is there, within the device. They may throw std::runtime_error, as all that follows.
  virtual void Copy(void* target, const void* source, std::size_t bytes) const = 0;
  virtual void Zero(void* data, std::size_t bytes) const = 0;
  // Stands behind what is queued; null on the host.
  virtual std::shared_ptr<ReadyEvent> Record() const = 0;
  // Blocks until what is queued is done.
  virtual void Synchronize() const = 0;
};

// The one that has this handle on the device; the host's handle is 0.
std::unique_ptr<Stream> StreamOf(int device, std::uintptr_t handle);

}  // namespace horovod_partial::attach
