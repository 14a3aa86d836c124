// Where a kernel's tensors go.
#pragma once

#include <tensorflow/core/framework/op_kernel.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "attach/device.h"
#include "attach/session.h"
#include "core/bucket_spec.h"
#include "tf/packed_tensors.h"

namespace horovod_partial::tf {

// The process set and the specification of buckets, from the attributes of a kernel.
class Destination {
 public:
  // An error is the context's.
  explicit Destination(tensorflow::OpKernelConstruction* context);

  // What the kernel's tensors travel by, where those of its device may; `name` is for an error.
  absl::Status GetSession(const std::string& name, const attach::Stream& stream,
                          std::shared_ptr<attach::Session>* session) const;

  // Arrives. `on_done` is called once, with the tensors back, unless this fails; maybe before it returns.
  absl::Status Arrive(const std::shared_ptr<attach::Session>& session, const std::string& bucket, const Caller& caller,
                      const std::shared_ptr<const PackedTensors>& tensors, int work,
                      std::function<void(const Operation&)> on_done) const;

 private:
  tensorflow::DataType type_{};
  int process_set_ = 0;
  int size_ = 1;
  BucketSpec spec_;
};

}  // namespace horovod_partial::tf
