// Settings that Python passes to TensorFlow's kernels.
#pragma once

#include <string>

namespace horovod_partial::tf {

// Returns the path of TensorFlow's Horovod library. Python sets it once, when it loads the operations.
const std::string& LibraryPath();

// Returns why tensors on GPUs are refused, or an empty text if they are accepted.
std::string GpuRefusal();

}  // namespace horovod_partial::tf
