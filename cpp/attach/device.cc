// The devices of a Horovod without CUDA: there is only the host. cuda/memory.cc has the same functions for CUDA.
#include "attach/device.h"

#if !HAVE_CUDA
#include <stdexcept>
#include <string>

namespace horovod_partial::attach {
namespace {

void RequireHost(int device) {
  if (device != Memory::kHost)
    throw std::invalid_argument("device " + std::to_string(device) + ": Horovod was built without CUDA");
}

}  // namespace

Memory& MemoryOf(int device) {
  RequireHost(device);
  return Memory::Host();
}

Memory& SpareMemoryOf(int device) { return MemoryOf(device); }

int DefaultDevice(int /*local_rank*/) { return Memory::kHost; }

std::unique_ptr<Stream> StreamOf(int device, std::uintptr_t /*handle*/) {
  RequireHost(device);
  return std::make_unique<HostStream>();
}

}  // namespace horovod_partial::attach
#endif
