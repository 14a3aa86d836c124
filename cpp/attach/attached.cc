#include "attach/attached.h"

#include <utility>

namespace horovod_partial::attach {

Attached& AttachedLibraries::Add(const std::string& path, const std::function<void(Attached&)>& fill) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto it = libraries_.find(path); it != libraries_.end()) return *it->second;
  auto attached = std::make_unique<Attached>();
  fill(*attached);
  return *(libraries_[path] = std::move(attached));
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
