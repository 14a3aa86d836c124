// What Python tells the kernels.
#pragma once

#include <string>

namespace horovod_partial::tf {

// The path of TensorFlow's Horovod: set once, when Python imports the operations.
const std::string& LibraryPath();

// Why tensors on GPUs are refused; empty if they are accepted.
std::string GpuRefusal();

}  // namespace horovod_partial::tf
