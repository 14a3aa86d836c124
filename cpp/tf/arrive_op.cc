// TensorFlow's operations on a bucket. A kernel hands over a contribution and does not wait. The thread that finishes
// the round calls TensorFlow back. Mostly this is Horovod's background thread, as with Horovod's own operations.
#include <tensorflow/core/framework/op_kernel.h>
#include <tensorflow/core/framework/resource_handle.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "attach/attachment.h"
#include "attach/device.h"
#include "attach/session.h"
#include "core/rounds/bucket_spec.h"
#include "engine/engine.h"
#include "tf/kernels.h"
#include "tf/packed_tensors.h"

namespace horovod_partial::tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

DataType CoreType(tensorflow::DataType type) {
  switch (type) {
    case tensorflow::DT_INT32: return DataType::kInt32;
    case tensorflow::DT_INT64: return DataType::kInt64;
    case tensorflow::DT_HALF: return DataType::kFloat16;
    case tensorflow::DT_FLOAT: return DataType::kFloat32;
    case tensorflow::DT_DOUBLE: return DataType::kFloat64;
    default: throw std::invalid_argument("tensors of type " + tensorflow::DataTypeString(type) + " are not reduced");
  }
}

class ArriveOp final : public tensorflow::AsyncOpKernel {
 public:
  explicit ArriveOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    std::string spec;
    OP_REQUIRES_OK(context, context->GetAttr("T", &type_));
    OP_REQUIRES_OK(context, context->GetAttr("process_set", &process_set_));
    OP_REQUIRES_OK(context, context->GetAttr("size", &size_));
    OP_REQUIRES_OK(context, context->GetAttr("spec", &spec));
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("graph", &graph_));
    try {
      spec_ = DecodeBucketSpec(spec);
    } catch (const std::exception& error) {
      context->SetStatus(absl::InvalidArgumentError(error.what()));
    }
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const absl::Status status = AsStatus([&] { return Start(context, done); });
    if (status.ok()) return;  // `done` may have been called already, and then the context is gone
    context->SetStatus(status);
    done();
  }

 private:
  // Hands a contribution to the bucket. If this succeeds, `done` is called once, maybe before this function returns. If
  // this fails or throws, `done` is never called.
  absl::Status Start(OpKernelContext* context, const DoneCallback& done) const {
    const int count = context->num_inputs() - 2;  // the first input is the bucket, and the last is `work`
    std::vector<std::int64_t> elements;
    for (int i = 1; i <= count; ++i) elements.push_back(context->input(i).NumElements());
    const std::shared_ptr<const attach::Stream> stream = StreamOf(context);
    const std::shared_ptr<attach::Session> session = attach::SessionOf(Library(), process_set_);
    absl::Status status = Check(session->engine(), stream->device());
    if (!status.ok()) return status;
    const auto tensors = std::make_shared<PackedTensors>(stream, type_, elements);
    status = tensors->Allocate(context);
    for (int i = 1; i <= count && status.ok(); ++i)
      status = tensors->Put(static_cast<std::size_t>(i - 1), context->input(i));
    if (!status.ok()) return status;
    BucketConfig config{spec_, &attach::MemoryOf(stream->device()), CoreType(type_), tensors->shape()};
    config.spec.policy.description = tensors->Describe(spec_.policy.description);
    // In eager code TensorFlow calls this kernel in the application's thread. The thread sleeps until `done` is called.
    const Caller caller{graph_ ? Caller::Kind::kGraph : Caller::Kind::kBlockedThread, context->step_id()};
    const int work = context->input(count + 1).scalar<int>()();
    const auto handle = session->engine().buckets().Declare(bucket_, config);
    session->engine().Arrive(
        handle, {tensors->source(), tensors->target(), 1, work}, stream->Record(),
        [context, done, count, tensors](const Operation& operation) {
          absl::Status result = operation.error.empty() ? absl::OkStatus() : absl::UnknownError(operation.error);
          for (int i = 0; i < count && result.ok(); ++i) result = tensors->SetResult(context, i);
          if (result.ok()) result = SetRoundInfo(context, count, operation);
          if (!result.ok()) context->SetStatus(result);
          done();
        },
        caller);
    return absl::OkStatus();
  }

  // Fails if tensors on `device` are refused, or if the number of ranks has changed since this operation was made.
  absl::Status Check(const Engine& engine, int device) const {
    if (device != Memory::kHost && !GpuRefusal().empty())
      return absl::InvalidArgumentError("rank " + std::to_string(engine.rank()) + ": " + bucket_ + ": " + GpuRefusal());
    if (engine.size() == size_) return absl::OkStatus();
    return absl::FailedPreconditionError("bucket " + bucket_ + " was made for " + std::to_string(size_) +
                                         " ranks, and now there are " + std::to_string(engine.size()) +
                                         "; make the optimizer anew, and trace tf.functions again");
  }

  tensorflow::DataType type_{};
  int process_set_ = 0;
  int size_ = 1;
  BucketSpec spec_;
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
