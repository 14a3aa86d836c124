#include "tf/kernels.h"

#include <xla/stream_executor/stream.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>

#include "engine/surroundings.h"

namespace horovod_partial::tf {
namespace {

// What Python has set. The application's threads set the refusal, and TensorFlow's threads read it.
attach::Attached* library = nullptr;
std::mutex refusal_mutex;          // guards `refusal`
auto& refusal = *new std::string;  // why tensors on GPUs are refused; never freed, because kernels may outlive main

}  // namespace

std::unique_ptr<attach::Stream> StreamOf(tensorflow::OpKernelContext* context) {
  const auto* const device = context->device()->tensorflow_accelerator_device_info();
  if (device == nullptr) return attach::StreamOf(Memory::kHost, 0);
  const auto handle = context->op_device_context()->stream()->platform_specific_handle();
  return attach::StreamOf(device->gpu_id, reinterpret_cast<std::uintptr_t>(handle.stream));
}

absl::Status AsStatus(const std::function<absl::Status()>& body) {
  try {
    return body();
  } catch (const EngineError& error) {
    return absl::UnknownError(error.what());
  } catch (const std::invalid_argument& error) {
    return absl::InvalidArgumentError(error.what());
  } catch (const std::exception& error) {
    return absl::FailedPreconditionError(error.what());
  }
}

attach::Attached& Library() { return *library; }

std::string GpuRefusal() {
  std::lock_guard<std::mutex> lock(refusal_mutex);
  return refusal;
}

}  // namespace horovod_partial::tf

// Marks functions that horovod_partial/tensorflow/graph.py calls.
#define EXPORTED extern "C" __attribute__((visibility("default")))

// Python has attached this process to the library, so this only finds it. No operation runs before.
EXPORTED void horovod_partial_set_library(const char* path) {
  horovod_partial::tf::library = &horovod_partial::attach::Attach(path, false);
}

EXPORTED bool horovod_partial_has_gpu_kernels() { return horovod_partial::tf::kHasGpuKernels; }

EXPORTED void horovod_partial_refuse_gpus(const char* why) {
  std::lock_guard<std::mutex> lock(horovod_partial::tf::refusal_mutex);
  horovod_partial::tf::refusal = why;
}
