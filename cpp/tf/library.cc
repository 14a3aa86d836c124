#include "tf/library.h"

#include <mutex>

#include "tf/device.h"

namespace horovod_partial::tf {
namespace {

std::string& Path() {
  static auto* path = new std::string;
  return *path;
}

// Why tensors on GPUs are refused. The application's threads set it, and TensorFlow's threads read it.
struct Refusal {
  std::mutex mutex;  // guards `text`
  std::string text;
};

Refusal& OfGpus() {
  static auto* refusal = new Refusal;
  return *refusal;
}

}  // namespace

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
