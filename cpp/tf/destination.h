// Where a kernel's messages go.
#pragma once

#include <tensorflow/core/framework/op_kernel.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "attach/session.h"
#include "core/bucket_spec.h"
#include "tf/message.h"

namespace horovod_partial::tf {

// The process set and the specification of buckets, from the attributes of a kernel.
class Destination {
 public:
  // An error is the context's.
  explicit Destination(tensorflow::OpKernelConstruction* context);

  // What the kernel's messages travel by; `name` is for an error.
  absl::Status GetSession(const std::string& name, std::shared_ptr<attach::Session>* session) const;

  // Arrives. `on_done` is called once, with the message back, unless this fails; maybe before it returns.
  absl::Status Arrive(const std::shared_ptr<attach::Session>& session, const std::string& bucket, const Caller& caller,
                      const std::shared_ptr<const Message>& message, int work,
                      std::function<void(const Work&)> on_done) const;

 private:
  tensorflow::DataType type_{};
  int process_set_ = 0;
  int size_ = 1;
  BucketSpec spec_;
};

}  // namespace horovod_partial::tf
