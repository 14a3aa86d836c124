// The memory and the streams of devices. Devices have Horovod's numbers. Only the files that implement these functions,
// device.cc and cuda/memory.cc, know if this build has CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "core/values/memory.h"

namespace horovod_partial::attach {

// Returns the memory of a device. Throws std::invalid_argument for a GPU if Horovod was built without CUDA.
Memory& MemoryOf(int device);

// Returns memory of the host that the device can use too, though slowly. A rank puts zeros there if its device has no
// memory left or has failed, because the other ranks wait for these zeros.
Memory& SpareMemoryOf(int device);

// Returns the device for the zeros of a rank that has no bucket on a GPU yet. Assumes one GPU for each local rank.
int DefaultDevice(int local_rank);

// A framework's stream on a device. Any thread may use it. A stream of the host has no queue: each call acts at once.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual int device() const = 0;

  // Copy copies within the device, and Zero fills memory with zeros. Both queue their work behind all earlier work of
  // the stream. Copy, Zero, Record and Synchronize may throw std::runtime_error.
  virtual void Copy(void* target, const void* source, std::size_t bytes) const = 0;
  virtual void Zero(void* data, std::size_t bytes) const = 0;
  // Returns an event that comes when all work that is queued on the stream now is done. Returns null on the host.
  virtual std::shared_ptr<ReadyEvent> Record() const = 0;
  // Blocks until all work that is queued on the stream now is done.
  virtual void Synchronize() const = 0;
};

// The stream of the host, which queues nothing.
class HostStream final : public Stream {
 public:
  int device() const override { return Memory::kHost; }
  void Copy(void* target, const void* source, std::size_t bytes) const override { std::memcpy(target, source, bytes); }
  void Zero(void* data, std::size_t bytes) const override { std::memset(data, 0, bytes); }
  std::shared_ptr<ReadyEvent> Record() const override { return nullptr; }
  void Synchronize() const override {}
};

// Returns the stream with this handle on the device. The handle of the host's stream is 0.
std::unique_ptr<Stream> StreamOf(int device, std::uintptr_t handle);

}  // namespace horovod_partial::attach
