// Where a bucket's bytes lie, and how they are worked on there.
#pragma once

#include <cstddef>

#include "core/dtype.h"

namespace horovod_partial {

// The host's memory, or a device's. Every operation has ended when it returns: late contributions need them, and those
// that are on time do not. Any thread.
class Memory {
 public:
  static constexpr int kHost = -1;
  static Memory& Host();

  virtual ~Memory() = default;
  virtual int device() const = 0;  // its number, or kHost

  // Throws std::bad_alloc; null for no bytes.
  virtual void* Allocate(std::size_t bytes) = 0;
  virtual void Free(void* data) = 0;
  virtual void Copy(void* target, const void* source, std::size_t bytes) = 0;
  virtual void Zero(void* data, std::size_t bytes) = 0;
  // As the functions of dtype.h.
  virtual void Add(DataType type, void* target, const void* source, std::size_t elements) = 0;
  virtual void Scale(DataType type, void* data, std::size_t elements, double factor) = 0;
  // Adds the source to the target, or with `first` copies it there; unless an element of it is infinite or not a
  // number: then the target is left as it was, and this is false. One operation, for a device tells the host only at
  // its end.
  virtual bool AddIfFinite(DataType type, void* target, const void* source, std::size_t elements, bool first) = 0;
};

// Memory that the host reads and writes by its addresses, whoever else does.
class HostAddressable : public Memory {
 public:
  void Copy(void* target, const void* source, std::size_t bytes) override;
  void Zero(void* data, std::size_t bytes) override;
  void Add(DataType type, void* target, const void* source, std::size_t elements) override;
  void Scale(DataType type, void* data, std::size_t elements, double factor) override;
  bool AddIfFinite(DataType type, void* target, const void* source, std::size_t elements, bool first) override;
};

}  // namespace horovod_partial
