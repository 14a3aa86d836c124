// Tensors that travel together, and what comes back.
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

// A tensor without elements has none of its own.
void* Address(const tensorflow::Tensor& tensor);

// A part of a packed tensor, from an element on, becomes an output of that shape.
absl::Status SetView(tensorflow::OpKernelContext* context, int output, const tensorflow::Tensor& packed,
                     std::int64_t begin, const tensorflow::TensorShape& shape);

// Tensors of one type in one piece of memory of the stream's device; one alone travels from where it lies. No lock:
// each tensor may be put into it by another thread, and all of them before it is sent.
class PackedTensors {
 public:
  PackedTensors(std::shared_ptr<const attach::Stream> stream, tensorflow::DataType type,
                const std::vector<std::int64_t>& elements);

  // Memory for the results, and for the tensors if there are several; `context` is that of one of them, and `input` its
  // number there. The result of one alone is the context's first output. It comes to where the tensor lies if nobody
  // else needs that, so this must be called before the tensor has another owner.
  absl::Status Allocate(tensorflow::OpKernelContext* context, int input);
  // On a device the copy is queued.
  absl::Status Put(std::size_t index, const tensorflow::Tensor& tensor);
  const attach::Stream& stream() const { return *stream_; }

  // --- With all tensors in it
  std::vector<std::int64_t> shape() const;
  // A policy and the shapes: what the ranks compare, since one total may be split in many ways.
  std::string Describe(const std::string& policy) const;
  void* source() const;
  void* target() const;
  // A result becomes an output, in the shape of its tensor.
  absl::Status SetResult(tensorflow::OpKernelContext* context, int output, std::size_t index) const;

 private:
  const std::shared_ptr<const attach::Stream> stream_;
  const tensorflow::DataType type_;
  const std::vector<std::int64_t> offsets_;
  std::vector<tensorflow::TensorShape> shapes_;
  tensorflow::Tensor source_;
  tensorflow::Tensor target_;
};

// What became of a round, as RoundInfo has it, in three outputs.
absl::Status SetRoundInfo(tensorflow::OpKernelContext* context, int first_output, const Operation& operation);

}  // namespace horovod_partial::tf
