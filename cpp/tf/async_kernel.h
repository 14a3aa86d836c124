// A kernel that no thread waits in.
#pragma once

#include <tensorflow/core/framework/op_kernel.h>

#include "tf/status.h"

namespace horovod_partial::tf {

class AsyncKernel : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) final {
    const absl::Status status = AsStatus([&] { return Start(context, done); });
    if (status.ok()) return;  // and the context may be gone by now
    context->SetStatus(status);
    done();
  }

 private:
  // Where it succeeds `done` is called once, maybe before it returns; otherwise, or where it throws, never.
  virtual absl::Status Start(tensorflow::OpKernelContext* context, const DoneCallback& done) const = 0;
};

}  // namespace horovod_partial::tf
