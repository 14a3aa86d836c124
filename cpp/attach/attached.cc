#include "attach/attached.h"

#include <utility>

namespace horovod_partial::attach {

void AttachedLibraries::Add(const std::string& path, const std::function<void(Attached&)>& fill) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (libraries_.count(path) > 0) return;
  auto attached = std::make_unique<Attached>();
  fill(*attached);
  libraries_[path] = std::move(attached);
}

Attached* AttachedLibraries::Find(const std::string& path) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = libraries_.find(path);
  return it == libraries_.end() ? nullptr : it->second.get();
}

void AttachedLibraries::CountGeneration() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [path, attached] : libraries_)
    if (attached->is_initialized() == 0) ++attached->generation;
}

AttachedLibraries& LibrariesOfProcess() {
  static auto* libraries = new AttachedLibraries;  // the list is never freed: Horovod's thread may outlive main
  return *libraries;
}

}  // namespace horovod_partial::attach
