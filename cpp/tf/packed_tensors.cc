#include "tf/packed_tensors.h"

#include <cstring>
#include <utility>

#include "core/merging/merging_plan.h"
#include "tf/kernels.h"

namespace horovod_partial::tf {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <class Number>
absl::Status SetVector(OpKernelContext* context, int index, const std::vector<Number>& numbers) {
  Tensor* output = nullptr;
  const auto size = static_cast<std::int64_t>(numbers.size());
  const absl::Status status = context->allocate_output(index, TensorShape({size}), &output);
  if (status.ok() && size > 0) std::memcpy(output->data(), numbers.data(), numbers.size() * sizeof(Number));
  return status;
}

}  // namespace

void* Address(const Tensor& tensor) {
  static char nothing;
  return tensor.NumElements() == 0 ? &nothing : tensor.data();
}

absl::Status SetView(OpKernelContext* context, int output, const Tensor& packed, std::int64_t begin,
                     const TensorShape& shape) {
  Tensor view;
  if (!view.CopyFrom(packed.Slice(begin, begin + shape.num_elements()), shape))
    return absl::InternalError("a view of a bucket has another size than its tensor");
  context->set_output(output, view);
  return absl::OkStatus();
}

PackedTensors::PackedTensors(std::shared_ptr<const attach::Stream> stream, tensorflow::DataType type,
                             const std::vector<std::int64_t>& elements)
    : stream_(std::move(stream)),
      type_(type),
      offsets_(PackedOffsets(elements, tensorflow::DataTypeSize(type))),
      shapes_(elements.size()) {}

absl::Status PackedTensors::Allocate(OpKernelContext* context) {
  if (shapes_.size() > 1) {
    const absl::Status status = context->allocate_temp(type_, TensorShape({offsets_.back()}), &source_);
    target_ = source_;
    return status;
  }
  Tensor* output = nullptr;
  const absl::Status status = context->forward_input_or_allocate_output({1}, 0, context->input(1).shape(), &output);
  if (status.ok()) target_ = *output;
  return status;
}

absl::Status PackedTensors::Put(std::size_t index, const Tensor& tensor) {
  shapes_[index] = tensor.shape();
  if (shapes_.size() == 1) {
    source_ = tensor;
    return absl::OkStatus();
  }
  const auto unit = static_cast<std::int64_t>(tensorflow::DataTypeSize(type_));
  const auto bytes = static_cast<std::size_t>(tensor.NumElements() * unit);
  const auto room = static_cast<std::size_t>((offsets_[index + 1] - offsets_[index]) * unit);
  char* const place = static_cast<char*>(Address(source_)) + offsets_[index] * unit;
  return AsStatus([&] {
    if (bytes > 0) stream_->Copy(place, tensor.data(), bytes);
    if (room > bytes) stream_->Zero(place + bytes, room - bytes);
    return absl::OkStatus();
  });
}

std::vector<std::int64_t> PackedTensors::shape() const {
  std::vector<std::int64_t> dimensions;
  for (int i = 0; i < source_.dims(); ++i) dimensions.push_back(source_.dim_size(i));
  return dimensions;
}

std::string PackedTensors::Describe(const std::string& policy) const {
  if (shapes_.size() == 1) return policy;  // ranks compare a single tensor's shape by the bucket's declaration
  std::string text = policy + " shapes=";
  for (const TensorShape& shape : shapes_) text += shape.DebugString();
  return text;
}

absl::Status PackedTensors::SetResult(OpKernelContext* context, int index) const {
  if (shapes_.size() == 1) return absl::OkStatus();
  const auto at = static_cast<std::size_t>(index);
  return SetView(context, index, target_, offsets_[at], shapes_[at]);
}

absl::Status SetRoundInfo(OpKernelContext* context, int first_output, const Operation& operation) {
  const RoundInfo& info = operation.info;
  const std::vector<std::int64_t> numbers{info.round,     info.late,      info.fresh,
                                          info.gradients, info.staleness, info.empty};
  absl::Status status = SetVector(context, first_output, numbers);
  if (status.ok()) status = SetVector(context, first_output + 1, info.members);
  if (status.ok()) status = SetVector(context, first_output + 2, info.work);
  return status;
}

}  // namespace horovod_partial::tf
