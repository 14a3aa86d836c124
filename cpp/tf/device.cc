#include "tf/device.h"

#include <xla/stream_executor/stream.h>

#include <cstdint>

namespace horovod_partial::tf {

std::unique_ptr<attach::Stream> StreamOf(tensorflow::OpKernelContext* context) {
  const auto* const device = context->device()->tensorflow_accelerator_device_info();
  if (device == nullptr) return attach::StreamOf(Memory::kHost, 0);
  const auto handle = context->op_device_context()->stream()->platform_specific_handle();
  return attach::StreamOf(device->gpu_id, reinterpret_cast<std::uintptr_t>(handle.stream));
}

}  // namespace horovod_partial::tf
