// Lets TensorFlow's kernels find the plan for merged gradients by name. Python declares and plans them.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "attach/session.h"
#include "core/merging/merging_steps.h"

namespace horovod_partial::attach {

// The MergingSteps of a training, for threads of TensorFlow and of Python. A graph is traced before there is a plan, so
// its kernels know only the name of the MergingSteps. The lock is never held together with another lock.
class SharedSteps {
 public:
  explicit SharedSteps(MergingSteps::Declaration declaration) : steps_(std::move(declaration)) {}

  // Returns the object of this name if its declaration is the same, or else a new one. Throws like MergingSteps().
  static std::shared_ptr<SharedSteps> Declare(const MergingSteps::Declaration& declaration);
  // Returns the object of this name. Throws std::invalid_argument if nothing in this process holds such an object.
  static std::shared_ptr<SharedSteps> Find(const std::string& name);

  // Forgets all plans if the last call was in another generation, because new ranks of an elastic job know no plan.
  void Enter(const std::shared_ptr<Session>& generation);

  // Calls `function` with the MergingSteps, while the lock is held.
  template <typename Function>
  auto With(Function function) {
    std::lock_guard<std::mutex> lock(mutex_);
    return function(steps_);
  }

 private:
  std::mutex mutex_;  // guards the members below
  MergingSteps steps_;
  std::weak_ptr<Session> generation_;
};

}  // namespace horovod_partial::attach
