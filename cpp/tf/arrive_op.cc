// What the graph operations do. No thread waits: a kernel arrives, and whoever finishes the round calls TensorFlow
// back, Horovod's background thread in general, as Horovod's own operations do.
#include <tensorflow/core/framework/op_kernel.h>
#include <tensorflow/core/framework/resource_handle.h>
#include <tensorflow/core/framework/tensor.h>
#include <tensorflow/core/framework/types.h>

#include <charconv>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attach/attachment.h"
#include "attach/library.h"
#include "bindings/bucket_config.h"
#include "core/packing.h"
#include "tf/step_waits.h"

namespace horovod_partial::tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The library of TensorFlow's Horovod: set once, when Python imports the operations.
std::string& LibraryPath() {
  static auto* path = new std::string;
  return *path;
}

StepWaits& Waits() {
  static auto* waits = new StepWaits;  // the background thread may outlive static objects
  return *waits;
}

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

void* Address(const Tensor& tensor) {
  static char nothing;  // a tensor without elements has no address
  return tensor.NumElements() == 0 ? &nothing : tensor.data();
}

// An operation under way: keeps what the round reads and writes, and tells TensorFlow.
class Call {
 public:
  Call(OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done)
      : context_(context), done_(std::move(done)) {}

  // Packs the tensors, unless there is but one. The result comes to where they lie then, if nobody else needs them.
  absl::Status Pack() {
    const int count = context_->num_inputs() - 2;  // the bucket comes first, what the weight follows from last
    if (count == 1) {
      Tensor* output = nullptr;  // asked for before the input has another owner here
      const absl::Status status =
          context_->forward_input_or_allocate_output({1}, 0, context_->input(1).shape(), &output);
      if (!status.ok()) return status;
      target_ = *output;
    }
    for (int i = 1; i <= count; ++i) tensors_.push_back(context_->input(i));
    std::vector<std::int64_t> elements;
    for (const Tensor& tensor : tensors_) elements.push_back(tensor.NumElements());
    offsets_ = PackedOffsets(elements, tensorflow::DataTypeSize(tensors_[0].dtype()));
    if (count == 1) {
      source_ = tensors_[0];
      return absl::OkStatus();
    }
    const absl::Status status = context_->allocate_temp(tensors_[0].dtype(), TensorShape({offsets_.back()}), &source_);
    if (!status.ok()) return status;
    auto* const begin = static_cast<char*>(Address(source_));
    const auto unit = static_cast<std::int64_t>(tensorflow::DataTypeSize(source_.dtype()));
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const auto bytes = static_cast<std::size_t>(tensors_[i].NumElements() * unit);
      const auto room = static_cast<std::size_t>((offsets_[i + 1] - offsets_[i]) * unit);
      char* const place = begin + offsets_[i] * unit;
      if (bytes > 0) std::memcpy(place, tensors_[i].data(), bytes);
      std::memset(place + bytes, 0, room - bytes);
    }
    target_ = source_;
    return absl::OkStatus();
  }

  std::vector<std::int64_t> shape() const {
    std::vector<std::int64_t> dimensions;
    for (int i = 0; i < source_.dims(); ++i) dimensions.push_back(source_.dim_size(i));
    return dimensions;
  }
  // What the ranks compare: one total may be split in many ways.
  std::string Describe(const std::string& policy) const {
    if (tensors_.size() == 1) return policy;  // Horovod compares its shape
    std::string text = policy + " shapes=";
    for (const Tensor& tensor : tensors_) text += tensor.shape().DebugString();
    return text;
  }
  Bucket::Arrival arrival() const {
    return {Address(source_), Address(target_), 1, context_->input(context_->num_inputs() - 1).scalar<int>()()};
  }

  void Finish(const Work& work) {
    const absl::Status status = work.error.empty() ? SetOutputs(work) : absl::UnknownError(work.error);
    if (!status.ok()) context_->SetStatus(status);
    done_();
  }

 private:
  absl::Status SetOutputs(const Work& work) {
    const int count = static_cast<int>(tensors_.size());
    if (count > 1) {
      for (int i = 0; i < count; ++i) {
        const Tensor& tensor = tensors_[static_cast<std::size_t>(i)];
        const std::int64_t begin = offsets_[static_cast<std::size_t>(i)];
        Tensor view;
        if (!view.CopyFrom(target_.Slice(begin, begin + tensor.NumElements()), tensor.shape()))
          return absl::InternalError("a view of a bucket has another size than its tensor");
        context_->set_output(i, view);
      }
    }
    const RoundInfo& info = work.info;
    const std::vector<std::int64_t> numbers{info.round,     info.late,      info.fresh,
                                            info.gradients, info.staleness, info.empty};
    absl::Status status = SetVector(count, numbers);
    if (status.ok()) status = SetVector(count + 1, info.members);
    if (status.ok()) status = SetVector(count + 2, info.work);
    return status;
  }

  template <class Number>
  absl::Status SetVector(int index, const std::vector<Number>& numbers) {
    Tensor* output = nullptr;
    const auto size = static_cast<std::int64_t>(numbers.size());
    const absl::Status status = context_->allocate_output(index, TensorShape({size}), &output);
    if (status.ok() && size > 0) std::memcpy(output->data(), numbers.data(), numbers.size() * sizeof(Number));
    return status;
  }

  OpKernelContext* const context_;  // TensorFlow's, until done_ is called
  const tensorflow::AsyncOpKernel::DoneCallback done_;
  std::vector<Tensor> tensors_;
  std::vector<std::int64_t> offsets_;
  Tensor source_;
  Tensor target_;
};

class ArriveOp final : public tensorflow::AsyncOpKernel {
 public:
  explicit ArriveOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    const auto get = [&](const char* name, auto* value) { OP_REQUIRES_OK(context, context->GetAttr(name, value)); };
    const auto get_real = [&](const char* name, double* value) {
      std::string text;
      get(name, &text);
      std::from_chars(text.data(), text.data() + text.size(), *value);  // whatever the program's locale
    };
    std::string rule, schedule, description;
    int quorum = 0, group_size = 0, window = 0;
    std::int64_t seed = 0, max_staleness = 0, period = 0;
    double grace_seconds = 0;
    std::vector<int> table;
    get("T", &type_);
    get("bucket", &bucket_);
    get("process_set", &process_set_);
    get("size", &size_);
    get("step", &step_);
    get("step_buckets", &step_buckets_);
    get("rule", &rule);
    get("quorum", &quorum);
    get("seed", &seed);
    get("max_staleness", &max_staleness);
    get_real("grace_seconds", &grace_seconds);
    get("schedule", &schedule);
    get("group_size", &group_size);
    get("table", &table);
    get("period", &period);
    get("window", &window);
    get("description", &description);
    get("missed", &arguments_.missed);
    get("late", &arguments_.late);
    get("divide_by_contributors", &arguments_.divide_by_contributors);
    get("drop_nonfinite", &arguments_.drop_nonfinite);
    get("drop_nonfinite_results", &arguments_.drop_nonfinite_results);
    get("weights", &arguments_.weights);
    get_real("weight_parameter", &arguments_.weight_parameter);
    get_real("prescale_factor", &arguments_.prescale_factor);
    get_real("postscale_factor", &arguments_.postscale_factor);
    if (!context->status().ok()) return;
    std::vector<Partition> rounds;  // flat in the attribute, a row for each round
    for (std::size_t i = 0; i < table.size(); ++i) {
      if (i % static_cast<std::size_t>(size_) == 0) rounds.emplace_back();
      rounds.back().push_back(table[i]);
    }
    try {
      policy_ = MakePolicy(rule, quorum, static_cast<std::uint64_t>(seed), max_staleness, grace_seconds, schedule,
                           group_size, rounds, period, window, description);
    } catch (const std::exception& error) {
      context->SetStatus(absl::InvalidArgumentError(error.what()));
    }
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const absl::Status status = Start(context, done);
    if (status.ok()) return;  // and the context may be gone by now
    context->SetStatus(status);
    done();
  }

 private:
  absl::Status Start(OpKernelContext* context, const DoneCallback& done) const {
    try {
      const auto call = std::make_shared<Call>(context, done);
      const absl::Status status = call->Pack();
      if (!status.ok()) return status;
      const auto session = attach::SessionOf(LibraryPath(), process_set_);
      if (session->engine().size() != size_)
        return absl::FailedPreconditionError("bucket " + bucket_ + " was made for " + std::to_string(size_) +
                                             " ranks, and now there are " + std::to_string(session->engine().size()) +
                                             "; make the optimizer anew, and trace tf.functions again");
      Policy policy = policy_;
      policy.description = call->Describe(policy_.description);
      const auto bucket =
          session->engine().Declare(bucket_, MakeConfig(CoreType(type_), call->shape(), -1, policy, arguments_));
      const std::string step = step_;
      const auto step_buckets = static_cast<std::size_t>(step_buckets_);
      const auto work = session->engine().Arrive(bucket, call->arrival(), nullptr,
                                                 [call](const Work& finished) { call->Finish(finished); });
      Waits().Add(step, step_buckets, {session, bucket, work});
      return absl::OkStatus();
    } catch (const TransportError& error) {
      return absl::UnknownError(error.what());
    } catch (const std::invalid_argument& error) {
      return absl::InvalidArgumentError(error.what());
    } catch (const std::exception& error) {
      return absl::FailedPreconditionError(error.what());
    }
  }

  tensorflow::DataType type_{};
  std::string bucket_;
  int process_set_ = 0;
  int size_ = 1;
  std::string step_;
  int step_buckets_ = 1;
  Policy policy_;
  BucketArguments arguments_;
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

class CompletedOp final : public tensorflow::OpKernel {
 public:
  explicit CompletedOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("process_set", &process_set_));
  }
  void Compute(OpKernelContext* context) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    output->scalar<std::int64_t>()() = attach::Completed(LibraryPath(), process_set_, bucket_);
  }

 private:
  std::string bucket_;
  int process_set_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("HorovodPartialCompleted").Device(tensorflow::DEVICE_CPU), CompletedOp);
REGISTER_KERNEL_BUILDER(Name("HorovodPartialBucket").Device(tensorflow::DEVICE_CPU), BucketOp);
REGISTER_KERNEL_BUILDER(Name("HorovodPartialArrive").Device(tensorflow::DEVICE_CPU), ArriveOp);

}  // namespace
}  // namespace horovod_partial::tf

// For horovod_partial/tensorflow/graph.py: where TensorFlow's Horovod is.
extern "C" __attribute__((visibility("default"))) void horovod_partial_set_library(const char* path) {
  horovod_partial::tf::LibraryPath() = path;
}
