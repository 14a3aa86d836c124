// The device that a kernel runs on.
#pragma once

#include <tensorflow/core/framework/op_kernel.h>

#include <memory>

#include "attach/device.h"

namespace horovod_partial::tf {

// Returns TensorFlow's stream on the kernel's device. TensorFlow makes a kernel's inputs, and hands out memory, in the
// order of this stream.
std::unique_ptr<attach::Stream> StreamOf(tensorflow::OpKernelContext* context);

// Whether there are kernels for GPUs: only if Horovod reduces tensors that lie there.
#if HOROVOD_PARTIAL_GPU_KERNELS
inline constexpr bool kHasGpuKernels = true;
#define HOROVOD_PARTIAL_GPU_KERNEL(definition, Kernel) \
  REGISTER_KERNEL_BUILDER(definition.Device(tensorflow::DEVICE_GPU), Kernel)
#else
inline constexpr bool kHasGpuKernels = false;
#define HOROVOD_PARTIAL_GPU_KERNEL(definition, Kernel) static_assert(true)
#endif

// Registers a kernel for every device. Handles of buckets, and what the host reads or writes, must be `HostMemory` in
// the definition.
#define REGISTER_KERNELS(definition, Kernel)                                  \
  REGISTER_KERNEL_BUILDER(definition.Device(tensorflow::DEVICE_CPU), Kernel); \
  HOROVOD_PARTIAL_GPU_KERNEL(definition, Kernel)

}  // namespace horovod_partial::tf
