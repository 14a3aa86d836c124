// The library of TensorFlow's Horovod.
#pragma once

#include <string>

namespace horovod_partial::tf {

// Its path: set once, when Python imports the operations.
const std::string& LibraryPath();

}  // namespace horovod_partial::tf
