#include "attach/merging.h"

#include <map>
#include <stdexcept>

namespace horovod_partial::attach {
namespace {

std::mutex registry_mutex;  // guards the map of steps by name

std::map<std::string, std::weak_ptr<SharedSteps>>& Registry() {
  static auto* registry = new std::map<std::string, std::weak_ptr<SharedSteps>>;
  return *registry;
}

}  // namespace

std::shared_ptr<SharedSteps> SharedSteps::Declare(const MergingSteps::Declaration& declaration) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  auto& registered = Registry()[declaration.name];
  auto steps = registered.lock();
  if (steps == nullptr || !(steps->steps_.declaration() == declaration)) {
    steps = std::make_shared<SharedSteps>(declaration);
    registered = steps;
  }
  return steps;
}

std::shared_ptr<SharedSteps> SharedSteps::Find(const std::string& name) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto it = Registry().find(name);
  auto steps = it == Registry().end() ? nullptr : it->second.lock();
  if (steps == nullptr)
    throw std::invalid_argument("the merged gradients " + name +
                                " are not known in this process: trace the function here, with the tape or the "
                                "optimizer that has merging=");
  return steps;
}

void SharedSteps::Enter(const std::shared_ptr<Session>& generation) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation_.lock() == generation) return;
  steps_.Restart();
  generation_ = generation;
}

}  // namespace horovod_partial::attach
