// What Python tells the kernels.
#pragma once

#include <string>

namespace horovod_partial::tf {

// The path of TensorFlow's Horovod: set once, when Python imports the operations.
const std::string& LibraryPath();

// Why tensors on GPUs are not taken; empty where they are.
std::string GpuRefusal();

}  // namespace horovod_partial::tf
