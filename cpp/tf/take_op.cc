// Kernels that take the result of a round once it has ended in all buckets of an optimizer. No kernel waits for rounds.
#include <tensorflow/core/framework/op_kernel.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "attach/attachment.h"
#include "core/merging/merging_plan.h"
#include "engine/engine.h"
#include "tf/kernels.h"
#include "tf/packed_tensors.h"

namespace horovod_partial::tf {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

std::string NameOf(int device) { return device == Memory::kHost ? "the host" : "GPU " + std::to_string(device); }

class MemoryOp final : public tensorflow::OpKernel {
 public:
  explicit MemoryOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("T", &type_));
    OP_REQUIRES_OK(context, context->GetAttr("shapes", &shapes_));
  }
  void Compute(OpKernelContext* context) override {
    std::vector<std::int64_t> elements;
    for (const TensorShape& shape : shapes_) elements.push_back(shape.num_elements());
    const auto offsets = PackedOffsets(elements, tensorflow::DataTypeSize(type_));
    Tensor packed;
    OP_REQUIRES_OK(context, context->allocate_temp(type_, TensorShape({offsets.back()}), &packed));
    for (std::size_t i = 0; i < shapes_.size(); ++i)
      OP_REQUIRES_OK(context, SetView(context, static_cast<int>(i), packed, offsets[i], shapes_[i]));
  }

 private:
  tensorflow::DataType type_{};
  std::vector<TensorShape> shapes_;
};

class TakeRoundOp final : public tensorflow::OpKernel {
 public:
  explicit TakeRoundOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("buckets", &buckets_));
    OP_REQUIRES_OK(context, context->GetAttr("counts", &counts_));
    OP_REQUIRES_OK(context, context->GetAttr("process_set", &process_set_));
  }

  void Compute(OpKernelContext* context) override {
    std::vector<void*> memory(buckets_.size());
    int first = 0;
    for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
      OP_REQUIRES_OK(context, UseInputs(context, buckets_[bucket], first, counts_[bucket], &memory[bucket]));
      first += counts_[bucket];
    }
    Tensor* gradients = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(first, TensorShape({}), &gradients));
    gradients->scalar<std::int32_t>()() = 0;
    try {
      const auto session = attach::FindSession(Library(), process_set_);
      if (session == nullptr) return;
      const auto stream = StreamOf(context);
      CheckDevices(*session, stream->device());
      // Work that is queued on the GPU may still use the memory for the results.
      const auto before_writing = [&stream] { stream->Synchronize(); };
      while (const auto taken = session->engine().families().TakeRound(buckets_, memory, before_writing)) {
        if (*taken == 0) continue;  // a round without gradients is no update
        gradients->scalar<std::int32_t>()() = *taken;
        return;
      }
    } catch (const std::invalid_argument& error) {
      context->SetStatus(absl::InvalidArgumentError(error.what()));
    } catch (const std::exception& error) {
      context->SetStatus(absl::UnknownError(error.what()));
    }
  }

 private:
  // Throws if TensorFlow has placed this kernel on another device than the arrivals.
  void CheckDevices(attach::Session& session, int device) const {
    for (const std::string& name : buckets_) {
      const auto config = session.engine().buckets().ConfigOf(name);
      if (config != nullptr && config->memory->device() != device)
        throw std::invalid_argument("rank " + std::to_string(session.engine().rank()) + ": the gradients of " + name +
                                    " lie on " + NameOf(config->memory->device()) + ", and are taken on " +
                                    NameOf(device) + ": flush under the tf.device that you train under");
    }
  }

  // Finds the memory for the result of a bucket. It is the memory of the bucket's input tensors, which must be one
  // piece. Fails if TensorFlow has copied the tensors one by one to another device.
  absl::Status UseInputs(OpKernelContext* context, const std::string& bucket, int first, int count, void** memory) {
    const int inputs = static_cast<int>(buckets_.size()) + first;
    const Tensor* begin = nullptr;  // the first tensor that has elements, if there is one
    for (int i = count - 1; i >= 0; --i) {
      const Tensor& tensor = context->input(inputs + i);
      if (begin != nullptr && tensor.NumElements() > 0 && begin->NumElements() > 0 && !begin->SharesBufferWith(tensor))
        return absl::InternalError("the memory of " + bucket +
                                   " went over another device; train and flush under one tf.device");
      if (begin == nullptr || tensor.NumElements() > 0) begin = &tensor;
      context->set_output(first + i, tensor);
    }
    *memory = Address(*begin);
    return absl::OkStatus();
  }

  std::vector<std::string> buckets_;
  std::vector<int> counts_;
  int process_set_ = 0;
};

class HasRoundOp final : public tensorflow::OpKernel {
 public:
  explicit HasRoundOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("buckets", &buckets_));
    OP_REQUIRES_OK(context, context->GetAttr("process_set", &process_set_));
  }
  void Compute(OpKernelContext* context) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    const auto session = attach::FindSession(Library(), process_set_);
    output->scalar<bool>()() = session != nullptr && session->engine().families().HasRound(buckets_);
  }

 private:
  std::vector<std::string> buckets_;
  int process_set_ = 0;
};

REGISTER_KERNELS(Name("HorovodPartialMemory"), MemoryOp);
REGISTER_KERNELS(Name("HorovodPartialTakeRound").HostMemory("handles").HostMemory("gradients"), TakeRoundOp);
REGISTER_KERNELS(Name("HorovodPartialHasRound").HostMemory("handles").HostMemory("found"), HasRoundOp);

}  // namespace
}  // namespace horovod_partial::tf
