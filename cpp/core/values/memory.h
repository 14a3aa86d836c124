// Memory of the host or of a device, buffers in it, and events of the device.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>

#include "core/values/dtype.h"

namespace horovod_partial {

// The memory of the host or of a device. Each function returns when its operation has ended. All late contributions
// need these operations. Contributions on time need them only for weights, averages and pending sums. Thread-safe.
class Memory {
 public:
  static constexpr int kHost = -1;
  static Memory& Host();

  virtual ~Memory() = default;
  virtual int device() const = 0;  // the number of the device, or kHost

  // Throws std::bad_alloc if there is too little memory. May return null for 0 bytes.
  virtual void* Allocate(std::size_t bytes) = 0;
  virtual void Free(void* data) = 0;
  virtual void Copy(void* target, const void* source, std::size_t bytes) = 0;
  virtual void Zero(void* data, std::size_t bytes) = 0;
  // Add and Scale do what the functions of the same names in dtype.h do.
  virtual void Add(DataType type, void* target, const void* source, std::size_t elements) = 0;
  virtual void Scale(DataType type, void* data, std::size_t elements, double factor) = 0;
  // Adds the source to the target, or copies the source if `first` is set. If an element of the source is infinite or
  // not a number, the function returns false and leaves the target unchanged. This is one operation, because each
  // operation makes the host wait for the device.
  virtual bool AddIfFinite(DataType type, void* target, const void* source, std::size_t elements, bool first) = 0;
};

// Memory that the host can read and write through pointers.
class HostAddressable : public Memory {
 public:
  void Copy(void* target, const void* source, std::size_t bytes) override { std::memcpy(target, source, bytes); }
  void Zero(void* data, std::size_t bytes) override { std::memset(data, 0, bytes); }
  void Add(DataType type, void* target, const void* source, std::size_t elements) override {
    horovod_partial::Add(type, target, source, elements);
  }
  void Scale(DataType type, void* data, std::size_t elements, double factor) override {
    horovod_partial::Scale(type, data, elements, factor);
  }
  bool AddIfFinite(DataType type, void* target, const void* source, std::size_t elements, bool first) override {
    if (!AllFinite(type, source, elements)) return false;
    first ? Copy(target, source, elements * SizeOf(type)) : Add(type, target, source, elements);
    return true;
  }
};

struct FreeMemory {
  Memory* memory = &Memory::Host();
  void operator()(void* data) const { memory->Free(data); }
};

// A piece of memory that is allocated when it is first needed.
class Buffer {
 public:
  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  void* data() { return data_.get(); }
  const void* data() const { return data_.get(); }
  Memory& memory() const { return *data_.get_deleter().memory; }

  // Allocates `size` bytes, unless the buffer has this size already. The contents of new memory are undefined.
  void Reserve(std::size_t size, Memory& memory = Memory::Host()) {
    if (size_ == size) return;
    data_ = std::unique_ptr<void, FreeMemory>(memory.Allocate(size), FreeMemory{&memory});
    size_ = size;
  }
  void Zero() { memory().Zero(data_.get(), size_); }

 private:
  std::unique_ptr<void, FreeMemory> data_;
  std::size_t size_ = 0;
};

// An event in the queue of a device, behind the work that computes a contribution. A framework queues work long before
// the device does it. The rank arrives when the device reaches the event. Nothing may touch the contribution before.
class ReadyEvent {
 public:
  virtual ~ReadyEvent() = default;
  virtual bool Ready() const = 0;  // may be called by any thread; does not block
};

}  // namespace horovod_partial
