// Horovod's view of the memory of a bucket.
#pragma once

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attach/horovod.h"
#include "core/values/dtype.h"
#include "core/values/memory.h"

namespace horovod_partial::attach {

static_assert(static_cast<int>(DataType::kInt32) == hvd::HOROVOD_INT32 &&
                  static_cast<int>(DataType::kInt64) == hvd::HOROVOD_INT64 &&
                  static_cast<int>(DataType::kFloat16) == hvd::HOROVOD_FLOAT16 &&
                  static_cast<int>(DataType::kFloat32) == hvd::HOROVOD_FLOAT32 &&
                  static_cast<int>(DataType::kFloat64) == hvd::HOROVOD_FLOAT64,
              "the core's data types are Horovod's");

static_assert(Memory::kHost == CPU_DEVICE_ID, "the core's number for the host is Horovod's");

inline hvd::DataType HorovodType(DataType type) { return static_cast<hvd::DataType>(type); }

// A tensor in memory that the application or the bucket owns.
class TensorView final : public hvd::Tensor {
 public:
  TensorView(const void* data, hvd::DataType type, std::vector<std::int64_t> shape, std::int64_t bytes)
      : data_(data), type_(type), shape_(std::move(shape)), bytes_(bytes) {}
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wignored-qualifiers"  // Horovod's declaration has the meaningless const
  const hvd::DataType dtype() const override { return type_; }
#pragma GCC diagnostic pop
  const hvd::TensorShape shape() const override { return shape_; }
  const void* data() const override { return data_; }
  std::int64_t size() const override { return bytes_; }

 private:
  const void* const data_;
  const hvd::DataType type_;
  const hvd::TensorShape shape_;
  const std::int64_t bytes_;
};

class FusionBuffer final : public hvd::PersistentBuffer {
 public:
  FusionBuffer(std::size_t size, Memory& memory) { buffer_.Reserve(size, memory); }
  const void* AccessData(std::shared_ptr<hvd::OpContext>) const override { return buffer_.data(); }

 private:
  Buffer buffer_;
};

// An OpContext that provides memory for Horovod's fusion buffer. Horovod asks the context of a fused response's first
// tensor for the buffer, and keeps one buffer for each framework. This context says that its framework is PyTorch,
// because Horovod's buffer for PyTorch can be used with the context of any tensor.
class BucketContext : public hvd::OpContext {
 public:
  explicit BucketContext(Memory& memory) : memory_(memory) {}

  hvd::Status AllocatePersistent(std::int64_t size, std::shared_ptr<hvd::PersistentBuffer>* buffer) override {
    try {
      *buffer = std::make_shared<FusionBuffer>(static_cast<std::size_t>(size), memory_);
    } catch (const std::bad_alloc& error) {
      // Without memory for the fusion buffer, this exception must end Horovod's loop, which logs the error. If an error
      // were returned instead, Horovod would begin its next reduction while the other ranks are still in this one.
      throw std::runtime_error("no memory for a fusion buffer of " + std::to_string(size) +
                               " bytes, which HOROVOD_FUSION_THRESHOLD sets: " + error.what());
    }
    return hvd::Status::OK();
  }
  hvd::Status AllocateOutput(hvd::TensorShape, std::shared_ptr<hvd::Tensor>*,
                             std::shared_ptr<hvd::ReadyEvent>*) override {
    return hvd::Status::UnknownError("an allreduce does not allocate its output");
  }
  hvd::Status AllocateZeros(std::int64_t, hvd::DataType, std::shared_ptr<hvd::Tensor>*) override {
    return hvd::Status::UnknownError("only a join allocates zeros");
  }
  hvd::Framework framework() const override { return hvd::Framework::PYTORCH; }

 private:
  Memory& memory_;
};

}  // namespace horovod_partial::attach
