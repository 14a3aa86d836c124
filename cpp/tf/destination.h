// The process set and the bucket in which a kernel's tensors are reduced.
#pragma once

#include <tensorflow/core/framework/op_kernel.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "attach/device.h"
#include "attach/session.h"
#include "core/rounds/bucket_spec.h"
#include "tf/packed_tensors.h"

namespace horovod_partial::tf {

// The process set and the specification of buckets, from the attributes of a kernel.
class Destination {
 public:
  // Errors are reported to the context.
  explicit Destination(tensorflow::OpKernelConstruction* context);

  // Gets the session of the process set. Fails if tensors on the stream's device are refused, or if the number of ranks
  // has changed. `name` is for the text of the error.
  absl::Status GetSession(const std::string& name, const attach::Stream& stream,
                          std::shared_ptr<attach::Session>* session) const;

  // Arrives at a bucket. `on_done` is called once when the results are in `tensors`, maybe before this returns. It is
  // never called if this fails.
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
