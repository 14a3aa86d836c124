// Horovod's headers, and access to protected members of its classes.
#pragma once

#include <utility>

#include "core/values/types.h"
#include "horovod/common/controller.h"
#include "horovod/common/global_state.h"
#include "horovod/common/ops/collective_operations.h"
#include "horovod/common/process_set.h"
#include "horovod/common/tensor_queue.h"

namespace horovod_partial::attach {

namespace hvd = horovod::common;

// These classes give access to protected members of their base classes. No object has one of these types.
struct ControllerAccess : hvd::Controller {
  using hvd::Controller::cross_rank_;
  using hvd::Controller::cross_size_;
  using hvd::Controller::message_table_;
  using hvd::Controller::tensor_queue_;
  using hvd::Controller::timeline_;
  static ControllerAccess& Of(hvd::Controller& controller) { return static_cast<ControllerAccess&>(controller); }
};

struct StallInspectorAccess : hvd::StallInspector {
  using hvd::StallInspector::perform_stall_check;
  using hvd::StallInspector::stall_shutdown_time_seconds;
  using hvd::StallInspector::stall_warning_time_seconds;
  static const StallInspectorAccess& Of(hvd::Controller& controller) {
    return static_cast<const StallInspectorAccess&>(controller.GetStallInspector());
  }
};

struct QueueAccess : hvd::TensorQueue {
  using hvd::TensorQueue::mutex_;
  using hvd::TensorQueue::tensor_table_;
  static QueueAccess& Of(hvd::Controller& controller) {
    return static_cast<QueueAccess&>(ControllerAccess::Of(controller).tensor_queue_);
  }
};

struct AllreduceAccess : hvd::AllreduceOp {
  using hvd::HorovodOp::global_state_;
};

// While an object of this class lives, `place` holds `value`. Afterwards it holds its old value again.
template <class T>
class Instead : private NonCopyable {
 public:
  Instead(T& place, T value) : place_(place), old_(std::exchange(place, std::move(value))) {}
  ~Instead() { place_ = std::move(old_); }

 private:
  T& place_;
  T old_;
};

}  // namespace horovod_partial::attach
