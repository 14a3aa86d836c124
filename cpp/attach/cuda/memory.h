// Memory of CUDA devices, and events of their streams. Compiled where Horovod has CUDA.
#pragma once

#include <cstdint>
#include <memory>

#include "attach/horovod.h"
#include "core/memory.h"

namespace horovod_partial::attach {

// The one of a device; never destroyed. Throws std::runtime_error if CUDA refuses.
Memory& CudaMemoryOf(int device);

// Stands behind what is queued on `stream`, a cudaStream_t, now. Horovod's reductions wait for it, and so does the
// core.
class CudaReadyEvent final : public ReadyEvent, public hvd::ReadyEvent {
 public:
  CudaReadyEvent(int device, std::uintptr_t stream);
  CudaReadyEvent(const CudaReadyEvent&) = delete;
  CudaReadyEvent& operator=(const CudaReadyEvent&) = delete;
  ~CudaReadyEvent() override;

  void Wait() override;
  bool Ready() const override;
  gpuEvent_t event() const override { return event_; }

 private:
  gpuEvent_t event_{};
};

}  // namespace horovod_partial::attach
