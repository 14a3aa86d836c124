// The steps of merged gradients. Python declares and plans them; TensorFlow's kernels find them by name.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "attach/session.h"
#include "core/merging/merging_steps.h"

namespace horovod_partial::attach {

// Steps that TensorFlow's threads and Python's threads share. A graph is traced before there is a plan, so its kernels
// know only the name of the steps. The lock is never held together with another one.
class SharedSteps {
 public:
  explicit SharedSteps(MergingSteps::Declaration declaration) : steps_(std::move(declaration)) {}

  // Returns the steps of that name if their declaration is the same; otherwise makes new ones under that name. Throws
  // what MergingSteps throws.
  static std::shared_ptr<SharedSteps> Declare(const MergingSteps::Declaration& declaration);
  // Returns the steps of that name. Throws std::invalid_argument if nothing in this process holds them.
  static std::shared_ptr<SharedSteps> Find(const std::string& name);

  // Restarts the steps if the last call was in another generation of Horovod: ranks that are new in an elastic job know
  // no plan.
  void Enter(const std::shared_ptr<Session>& generation);

  // Calls a function with the steps, under the lock.
  template <typename Function>
  auto With(Function function) {
    std::lock_guard<std::mutex> lock(mutex_);
    return function(steps_);
  }

 private:
  std::mutex mutex_;  // guards all below
  MergingSteps steps_;
  std::weak_ptr<Session> generation_;
};

}  // namespace horovod_partial::attach
