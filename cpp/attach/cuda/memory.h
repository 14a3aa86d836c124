// Memory and streams of CUDA devices, and events of these streams. Compiled only if Horovod has CUDA.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "attach/device.h"
#include "core/values/memory.h"
#include "core/values/types.h"

namespace horovod_partial::attach {

// Returns how many devices this process sees, without making a CUDA context.
int CudaDevices();

// Returns the memory of a device, which is never destroyed. Throws std::runtime_error if CUDA reports an error.
Memory& CudaMemoryOf(int device);

// These functions implement SpareMemoryOf and StreamOf of attach/device.h for CUDA devices.
Memory& PinnedMemoryOf(int device);
std::unique_ptr<Stream> CudaStreamOf(int device, std::uintptr_t handle);

// An event that comes when all work that is queued on `stream` now is done. `stream` is a cudaStream_t.
class CudaReadyEvent final : public ReadyEvent, private NonCopyable {
 public:
  CudaReadyEvent(int device, std::uintptr_t stream);
  ~CudaReadyEvent() override;

  bool Ready() const override;

 private:
  const CUcontext context_;
  cudaEvent_t event_{};
};

}  // namespace horovod_partial::attach
