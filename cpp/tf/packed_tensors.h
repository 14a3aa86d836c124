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

// Returns the address of a tensor's elements. It is never null, even if there are none.
void* Address(const tensorflow::Tensor& tensor);

// Makes a part of a packed tensor an output of that shape; the part begins at element `begin`.
absl::Status SetView(tensorflow::OpKernelContext* context, int output, const tensorflow::Tensor& packed,
                     std::int64_t begin, const tensorflow::TensorShape& shape);

// Tensors of one type, in one piece of memory on the stream's device. A single tensor is not copied: it travels from
// where it lies. There is no lock: each tensor may be put in by another thread, and all must be in before the message
// is sent.
class PackedTensors {
 public:
  PackedTensors(std::shared_ptr<const attach::Stream> stream, tensorflow::DataType type,
                const std::vector<std::int64_t>& elements);

  // Allocates memory for the results, and for the tensors if there are several. `context` is that of one of them, and
  // `input` is its number there. The result of a single tensor is the context's first output. It goes to the tensor's
  // own memory if nothing else needs that, so call this before the tensor has another owner.
  absl::Status Allocate(tensorflow::OpKernelContext* context, int input);
  // Puts a tensor into the message. On a device the copy is queued.
  absl::Status Put(std::size_t index, const tensorflow::Tensor& tensor);
  const attach::Stream& stream() const { return *stream_; }

  // --- Only with all tensors in it
  std::vector<std::int64_t> shape() const;
  // Returns a policy's text with the shapes of the tensors. The ranks compare it, since one total may be split in many
  // ways.
  std::string Describe(const std::string& policy) const;
  void* source() const;
  void* target() const;
  // Makes the result of a tensor an output, in that tensor's shape.
  absl::Status SetResult(tensorflow::OpKernelContext* context, int output, std::size_t index) const;

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
