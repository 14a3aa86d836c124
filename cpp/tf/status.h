// Turns our exceptions into TensorFlow's statuses.
#pragma once

#include <tensorflow/core/framework/op_kernel.h>

#include <functional>

namespace horovod_partial::tf {

// Returns what `body` returns, or a status for the exception that it throws.
absl::Status AsStatus(const std::function<absl::Status()>& body);

}  // namespace horovod_partial::tf
