#include "core/values/memory.h"

#include <cstdlib>
#include <new>

namespace horovod_partial {
namespace {

class HostMemory final : public HostAddressable {
 public:
  int device() const override { return kHost; }

  void* Allocate(std::size_t bytes) override {
    constexpr std::size_t kAlignment = 64;  // the alignment that vector instructions need
    void* data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    if (data == nullptr && bytes != 0) throw std::bad_alloc();
    return data;
  }
  void Free(void* data) override { std::free(data); }
};

}  // namespace

Memory& Memory::Host() {
  static auto* memory = new HostMemory;  // this object is never freed, because buffers may outlive static objects
  return *memory;
}

}  // namespace horovod_partial
