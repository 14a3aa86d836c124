// The memory of a bucket, and the operations on it.
#pragma once

#include <cstddef>

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
  void Copy(void* target, const void* source, std::size_t bytes) override;
  void Zero(void* data, std::size_t bytes) override;
  void Add(DataType type, void* target, const void* source, std::size_t elements) override;
  void Scale(DataType type, void* data, std::size_t elements, double factor) override;
  bool AddIfFinite(DataType type, void* target, const void* source, std::size_t elements, bool first) override;
};

}  // namespace horovod_partial
