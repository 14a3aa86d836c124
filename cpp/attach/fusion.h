// The steps of merged gradients, which Python declares and plans, and TensorFlow's kernels find by name.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "attach/session.h"
#include "core/fusion_steps.h"

namespace horovod_partial::attach {

// A graph is traced once, and its plan comes later, so its kernels know no more than a name. Used by TensorFlow's
// threads and Python's; the lock is never held with another.
class SharedSteps {
 public:
  explicit SharedSteps(FusionSteps::Declaration declaration) : steps_(std::move(declaration)) {}

  // The steps of that name; those that exist, if they were declared alike. Throws as FusionSteps.
  static std::shared_ptr<SharedSteps> Declare(const FusionSteps::Declaration& declaration);
  // Throws std::invalid_argument if nobody holds steps of that name in this process.
  static std::shared_ptr<SharedSteps> Find(const std::string& name);

  // Begins anew unless this is the generation of Horovod in which the last step was: ranks that are new in an elastic
  // job know no plan.
  void Enter(const std::shared_ptr<Session>& generation);

  // Calls a function with the steps, under the lock.
  template <typename Function>
  auto With(Function function) {
    std::lock_guard<std::mutex> lock(mutex_);
    return function(steps_);
  }

 private:
  std::mutex mutex_;  // guards all below
  FusionSteps steps_;
  std::weak_ptr<Session> generation_;
};

}  // namespace horovod_partial::attach
