// The plans of merged gradients, which kernels follow and Python makes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "attach/session.h"
#include "core/merged_steps.h"

namespace horovod_partial::tf {

// One for the process: a graph is traced once, and its plan comes later, so its kernels know no more than a name.
// TensorFlow's threads and Python's; the lock is never held with another.
class Merging {
 public:
  static Merging& Instance();

  // The same again changes nothing; another one, of a later generation of Horovod, begins anew. Throws as MergedSteps.
  void Declare(const MergedSteps::Declaration& declaration);
  // With the steps of that name under the lock. Where a generation of Horovod is given, and is not the one before, they
  // begin anew first: ranks that are new in an elastic job know no plan. Throws std::invalid_argument for a name that
  // nobody has declared in this process.
  void With(const std::string& name, const std::shared_ptr<attach::Session>& generation,
            const std::function<void(MergedSteps&)>& body);
  void With(const std::string& name, const std::function<void(MergedSteps&)>& body) { With(name, nullptr, body); }

 private:
  struct Entry {
    std::unique_ptr<MergedSteps> steps;
    std::weak_ptr<attach::Session> generation;  // in which the last of them was
  };

  std::mutex mutex_;  // guards all below
  std::map<std::string, Entry> entries_;
};

}  // namespace horovod_partial::tf
