#include "tf/kernels.h"

#include <xla/stream_executor/stream.h>

#include <cstdint>
#include <mutex>
#include <stdexcept>

#include "engine/engine.h"

namespace horovod_partial::tf {
namespace {

std::string& Path() {
  static auto* path = new std::string;
  return *path;
}

// Why tensors on GPUs are refused. The application's threads set the text, and TensorFlow's threads read it.
struct Refusal {
  std::mutex mutex;  // guards `text`
  std::string text;
};

Refusal& OfGpus() {
  static auto* refusal = new Refusal;
  return *refusal;
}

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

const std::string& LibraryPath() { return Path(); }

std::string GpuRefusal() {
  std::lock_guard<std::mutex> lock(OfGpus().mutex);
  return OfGpus().text;
}

}  // namespace horovod_partial::tf

// Marks functions that horovod_partial/tensorflow/graph.py calls.
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void horovod_partial_set_library(const char* path) { horovod_partial::tf::Path() = path; }

EXPORTED bool horovod_partial_has_gpu_kernels() { return horovod_partial::tf::kHasGpuKernels; }

EXPORTED void horovod_partial_refuse_gpus(const char* why) {
  auto& refusal = horovod_partial::tf::OfGpus();
  std::lock_guard<std::mutex> lock(refusal.mutex);
  refusal.text = why;
}
