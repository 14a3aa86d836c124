// A kernel in which no thread waits.
#pragma once

#include <tensorflow/core/framework/op_kernel.h>

#include "tf/status.h"

namespace horovod_partial::tf {

class AsyncKernel : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) final {
    const absl::Status status = AsStatus([&] { return Start(context, done); });
    if (status.ok()) return;  // the context may be gone by now
    context->SetStatus(status);
    done();
  }

 private:
  // Begins the work of the kernel. If this succeeds, `done` is called once, maybe before this returns. If this fails or
  // throws, it never calls `done`.
  virtual absl::Status Start(tensorflow::OpKernelContext* context, const DoneCallback& done) const = 0;
};

}  // namespace horovod_partial::tf
