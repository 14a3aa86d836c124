// Memory for contributions and results.
#pragma once

#include <cstddef>
#include <memory>

#include "core/values/memory.h"

namespace horovod_partial {

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

}  // namespace horovod_partial
