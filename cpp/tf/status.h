// Exceptions of ours as TensorFlow's statuses.
#pragma once

#include <tensorflow/core/framework/op_kernel.h>

#include <functional>

namespace horovod_partial::tf {

// What `body` returns, or the error that it throws.
absl::Status AsStatus(const std::function<absl::Status()>& body);

}  // namespace horovod_partial::tf
