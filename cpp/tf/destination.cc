#include "tf/destination.h"

#include <stdexcept>
#include <utility>

#include "attach/attachment.h"
#include "attach/device.h"
#include "engine/engine.h"
#include "tf/library.h"
#include "tf/status.h"

namespace horovod_partial::tf {
namespace {

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

}  // namespace

Destination::Destination(tensorflow::OpKernelConstruction* context) {
  std::string spec;
  OP_REQUIRES_OK(context, context->GetAttr("T", &type_));
  OP_REQUIRES_OK(context, context->GetAttr("process_set", &process_set_));
  OP_REQUIRES_OK(context, context->GetAttr("size", &size_));
  OP_REQUIRES_OK(context, context->GetAttr("spec", &spec));
  try {
    spec_ = DecodeBucketSpec(spec);
  } catch (const std::exception& error) {
    context->SetStatus(absl::InvalidArgumentError(error.what()));
  }
}

absl::Status Destination::GetSession(const std::string& name, const attach::Stream& stream,
                                     std::shared_ptr<attach::Session>* session) const {
  return AsStatus([&]() -> absl::Status {
    *session = attach::SessionOf(LibraryPath(), process_set_);
    const Engine& engine = (*session)->engine();
    if (stream.device() != Memory::kHost && !GpuRefusal().empty())
      return absl::InvalidArgumentError("rank " + std::to_string(engine.rank()) + ": " + name + ": " + GpuRefusal());
    const int size = engine.size();
    if (size == size_) return absl::OkStatus();
    return absl::FailedPreconditionError("bucket " + name + " was made for " + std::to_string(size_) +
                                         " ranks, and now there are " + std::to_string(size) +
                                         "; make the optimizer anew, and trace tf.functions again");
  });
}

absl::Status Destination::Arrive(const std::shared_ptr<attach::Session>& session, const std::string& bucket,
                                 const Caller& caller, const std::shared_ptr<const PackedTensors>& tensors, int work,
                                 std::function<void(const Operation&)> on_done) const {
  return AsStatus([&]() -> absl::Status {
    const attach::Stream& stream = tensors->stream();
    BucketConfig config{spec_, &attach::MemoryOf(stream.device()), CoreType(type_), tensors->shape()};
    config.spec.policy.description = tensors->Describe(spec_.policy.description);
    const auto handle = session->engine().Declare(bucket, config);
    session->engine().Arrive(handle, {tensors->source(), tensors->target(), 1, work}, stream.Record(),
                             std::move(on_done), caller);
    return absl::OkStatus();
  });
}

}  // namespace horovod_partial::tf
