// Settings that Python passes to TensorFlow's kernels.
#pragma once

#include <string>

namespace horovod_partial::tf {

// The path of TensorFlow's Horovod. It is set once, when Python imports the operations.
const std::string& LibraryPath();

// Returns why tensors on GPUs are refused, or an empty text if they are accepted.
std::string GpuRefusal();

}  // namespace horovod_partial::tf
