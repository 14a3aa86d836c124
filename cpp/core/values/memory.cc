#include "core/values/memory.h"

#include <cstdlib>
#include <cstring>
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

void HostAddressable::Copy(void* target, const void* source, std::size_t bytes) { std::memcpy(target, source, bytes); }

void HostAddressable::Zero(void* data, std::size_t bytes) { std::memset(data, 0, bytes); }

void HostAddressable::Add(DataType type, void* target, const void* source, std::size_t elements) {
  horovod_partial::Add(type, target, source, elements);
}

void HostAddressable::Scale(DataType type, void* data, std::size_t elements, double factor) {
  horovod_partial::Scale(type, data, elements, factor);
}

bool HostAddressable::AddIfFinite(DataType type, void* target, const void* source, std::size_t elements, bool first) {
  if (!AllFinite(type, source, elements)) return false;
  first ? Copy(target, source, elements * SizeOf(type)) : Add(type, target, source, elements);
  return true;
}

}  // namespace horovod_partial
