// Tensors that travel in one message, and their results.
#pragma once

#include <tensorflow/core/framework/op_kernel.h>
#include <tensorflow/core/framework/tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attach/device.h"
#include "engine/engine.h"

namespace horovod_partial::tf {

// Returns the address of a tensor's elements. It is never null, even if the tensor has no elements.
void* Address(const tensorflow::Tensor& tensor);

// Makes a part of a packed tensor the kernel's output of index `output`, in this shape. The part begins at `begin`.
absl::Status SetView(tensorflow::OpKernelContext* context, int output, const tensorflow::Tensor& packed,
                     std::int64_t begin, const tensorflow::TensorShape& shape);

// Tensors of one type, in one piece of memory on the stream's device. A single tensor is not copied, but sent from
// where it lies. One thread puts all tensors in, before the message is sent.
class PackedTensors {
 public:
  PackedTensors(std::shared_ptr<const attach::Stream> stream, tensorflow::DataType type,
                const std::vector<std::int64_t>& elements);

  // Allocates memory for the results, and for the tensors if there are several. A single tensor is the second input of
  // the kernel, and its result becomes the first output. The result is written over the tensor if the tensor has no
  // other owner. So call this before Put, which makes this object an owner.
  absl::Status Allocate(tensorflow::OpKernelContext* context);
  // Puts a tensor into the message. A copy on a GPU is only queued on the stream.
  absl::Status Put(std::size_t index, const tensorflow::Tensor& tensor);

  // --- Functions that may be called only when all tensors are in the message
  std::vector<std::int64_t> shape() const;
  // Returns the text of a policy with the shapes of the tensors. The ranks compare this text, because tensors of other
  // shapes may have the same total size.
  std::string Describe(const std::string& policy) const;
  void* source() const { return Address(source_); }
  void* target() const { return Address(target_); }
  // Makes the result of tensor `index` the kernel's output of this index, in the shape of the tensor.
  absl::Status SetResult(tensorflow::OpKernelContext* context, int index) const;

 private:
  const std::shared_ptr<const attach::Stream> stream_;
  const tensorflow::DataType type_;
  const std::vector<std::int64_t> offsets_;
  std::vector<tensorflow::TensorShape> shapes_;
  tensorflow::Tensor source_;
  tensorflow::Tensor target_;
};

// Sets three outputs, from `first_output` on, to the operation's RoundInfo.
absl::Status SetRoundInfo(tensorflow::OpKernelContext* context, int first_output, const Operation& operation);

}  // namespace horovod_partial::tf
