// Operations on one bucket. No thread waits in them: a kernel arrives, and the thread that finishes the round calls
// TensorFlow back. As a rule this is Horovod's background thread, as with Horovod's own operations.
#include <tensorflow/core/framework/op_kernel.h>
#include <tensorflow/core/framework/resource_handle.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attach/attachment.h"
#include "tf/async_kernel.h"
#include "tf/destination.h"
#include "tf/device.h"
#include "tf/library.h"
#include "tf/packed_tensors.h"

namespace horovod_partial::tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class ArriveOp final : public AsyncKernel {
 public:
  explicit ArriveOp(OpKernelConstruction* context) : AsyncKernel(context), destination_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("graph", &graph_));
  }

 private:
  absl::Status Start(OpKernelContext* context, const DoneCallback& done) const override {
    const int count = context->num_inputs() - 2;  // the bucket is the first input, and the work is the last
    std::vector<std::int64_t> elements;
    for (int i = 1; i <= count; ++i) elements.push_back(context->input(i).NumElements());
    std::shared_ptr<attach::Stream> stream = StreamOf(context);
    std::shared_ptr<attach::Session> session;
    absl::Status status = destination_.GetSession(bucket_, *stream, &session);
    if (!status.ok()) return status;
    const auto tensors = std::make_shared<PackedTensors>(std::move(stream), context->input(1).dtype(), elements);
    status = tensors->Allocate(context, 1);
    for (int i = 1; i <= count && status.ok(); ++i)
      status = tensors->Put(static_cast<std::size_t>(i - 1), context->input(i));
    if (!status.ok()) return status;
    // In eager code TensorFlow calls this in the application's thread, which sleeps until `done` is called.
    const Caller caller{graph_ ? Caller::Kind::kGraph : Caller::Kind::kBlockedThread, context->step_id()};
    return destination_.Arrive(session, bucket_, caller, tensors, context->input(count + 1).scalar<int>()(),
                               [context, done, count, tensors](const Operation& operation) {
                                 const absl::Status result = SetOutputs(context, count, *tensors, operation);
                                 if (!result.ok()) context->SetStatus(result);
                                 done();
                               });
  }

  static absl::Status SetOutputs(OpKernelContext* context, int count, const PackedTensors& tensors,
                                 const Operation& operation) {
    if (!operation.error.empty()) return absl::UnknownError(operation.error);
    for (int i = 0; i < count; ++i) {
      const absl::Status status = tensors.SetResult(context, i, static_cast<std::size_t>(i));
      if (!status.ok()) return status;
    }
    return SetRoundInfo(context, count, operation);
  }

  const Destination destination_;
  std::string bucket_;
  bool graph_ = false;
};

class BucketOp final : public tensorflow::OpKernel {
 public:
  explicit BucketOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
  }
  void Compute(OpKernelContext* context) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    tensorflow::ResourceHandle handle;
    handle.set_device(context->device()->attributes().name());
    handle.set_container("horovod_partial");
    handle.set_name(bucket_);
    output->scalar<tensorflow::ResourceHandle>()() = handle;
  }

 private:
  std::string bucket_;
};

REGISTER_KERNELS(Name("HorovodPartialBucket").HostMemory("handle"), BucketOp);
REGISTER_KERNELS(Name("HorovodPartialArrive")
                     .HostMemory("handle")
                     .HostMemory("work")
                     .HostMemory("info")
                     .HostMemory("members")
                     .HostMemory("member_work"),
                 ArriveOp);

}  // namespace
}  // namespace horovod_partial::tf
