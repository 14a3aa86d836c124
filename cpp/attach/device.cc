#include "attach/device.h"

#include <stdexcept>
#include <string>

#include "attach/horovod.h"
#if HAVE_CUDA
#include "attach/cuda/memory.h"
#endif

namespace horovod_partial::attach {

static_assert(Memory::kHost == CPU_DEVICE_ID, "the core's number for the host is Horovod's");

namespace {

[[maybe_unused]] [[noreturn]] void Refuse(int device) {
  throw std::invalid_argument("device " + std::to_string(device) + ": Horovod was built without CUDA");
}

}  // namespace

Memory& MemoryOf(int device) {
  if (device == Memory::kHost) return Memory::Host();
#if HAVE_CUDA
  return CudaMemoryOf(device);
#else
  Refuse(device);
#endif
}

Memory& SpareMemoryOf(int device) {
  if (device == Memory::kHost) return Memory::Host();
#if HAVE_CUDA
  return PinnedMemoryOf(device);
#else
  Refuse(device);
#endif
}

int DefaultDevice([[maybe_unused]] int local_rank) {
#if HAVE_CUDA
  return local_rank % CudaDevices();
#else
  return Memory::kHost;
#endif
}

std::unique_ptr<Stream> StreamOf(int device, [[maybe_unused]] std::uintptr_t handle) {
  if (device == Memory::kHost) return std::make_unique<HostStream>();
#if HAVE_CUDA
  return CudaStreamOf(device, handle);
#else
  Refuse(device);
#endif
}

}  // namespace horovod_partial::attach
