// What all kernels use: their device and registration, settings that Python passes to them, and errors.
#pragma once

#include <tensorflow/core/framework/op_kernel.h>

#include <functional>
#include <memory>
#include <string>

#include "attach/attached.h"
#include "attach/device.h"

namespace horovod_partial::tf {

// Returns TensorFlow's stream on the kernel's device. TensorFlow makes the inputs of a kernel, and hands out memory, in
// the order of this stream.
std::unique_ptr<attach::Stream> StreamOf(tensorflow::OpKernelContext* context);

// True if this build has kernels for GPUs. It has them only if Horovod can reduce tensors on GPUs.
#if HOROVOD_PARTIAL_GPU_KERNELS
inline constexpr bool kHasGpuKernels = true;
#define HOROVOD_PARTIAL_GPU_KERNEL(definition, Kernel) \
  REGISTER_KERNEL_BUILDER(definition.Device(tensorflow::DEVICE_GPU), Kernel)
#else
inline constexpr bool kHasGpuKernels = false;
#define HOROVOD_PARTIAL_GPU_KERNEL(definition, Kernel) static_assert(true)
#endif

// Registers a kernel for every kind of device. In `definition`, handles of buckets must be `HostMemory`, and so must
// everything that the kernel reads or writes on the host.
#define REGISTER_KERNELS(definition, Kernel)                                  \
  REGISTER_KERNEL_BUILDER(definition.Device(tensorflow::DEVICE_CPU), Kernel); \
  HOROVOD_PARTIAL_GPU_KERNEL(definition, Kernel)

// Returns what `body` returns, or a status for the exception that it throws.
absl::Status AsStatus(const std::function<absl::Status()>& body);

// Returns TensorFlow's Horovod library. Python names the library once, when it loads the operations.
attach::Attached& Library();

// Returns why tensors on GPUs are refused, or an empty text if they are accepted.
std::string GpuRefusal();

}  // namespace horovod_partial::tf
