// Host memory for contributions and results.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace horovod_partial {

// Aligned for vector instructions; empty until it is first needed.
class Buffer {
 public:
  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }
  void* data() { return data_.get(); }
  const void* data() const { return data_.get(); }

  // Storage of `size` bytes, whose contents are undefined if it was not there before.
  void Reserve(std::size_t size) {
    if (size_ == size) return;
    constexpr std::size_t kAlignment = 64;
    data_.reset(std::aligned_alloc(kAlignment, (size + kAlignment - 1) / kAlignment * kAlignment));
    if (data_ == nullptr && size != 0) throw std::bad_alloc();
    size_ = size;
  }
  void Zero() { std::memset(data_.get(), 0, size_); }

 private:
  struct Free {
    void operator()(void* pointer) const { std::free(pointer); }
  };
  std::unique_ptr<void, Free> data_;
  std::size_t size_ = 0;
};

}  // namespace horovod_partial
