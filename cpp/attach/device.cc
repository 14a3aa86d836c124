#include "attach/device.h"

#include <stdexcept>
#include <string>

#include "attach/horovod.h"
#if HAVE_CUDA
#include "attach/cuda/memory.h"
#endif

namespace horovod_partial::attach {

static_assert(Memory::kHost == CPU_DEVICE_ID, "the core's number for the host is Horovod's");

Memory& MemoryOf(int device) {
  if (device == Memory::kHost) return Memory::Host();
#if HAVE_CUDA
  return CudaMemoryOf(device);
#else
  throw std::invalid_argument("device " + std::to_string(device) + ": Horovod was built without CUDA");
#endif
}

int DefaultDevice([[maybe_unused]] int local_rank) {
#if HAVE_CUDA
  return local_rank % CudaDevices();
#else
  return Memory::kHost;
#endif
}

std::shared_ptr<ReadyEvent> RecordReadyEvent([[maybe_unused]] int device, [[maybe_unused]] std::uintptr_t stream) {
#if HAVE_CUDA
  if (device != Memory::kHost) return std::make_shared<CudaReadyEvent>(device, stream);
#endif
  return nullptr;
}

}  // namespace horovod_partial::attach
