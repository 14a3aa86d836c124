#include "attach/attached.h"

#include <map>
#include <mutex>
#include <utility>

namespace horovod_partial::attach {
namespace {

// A thread that holds this mutex waits neither for other ranks nor for the lock of Python's interpreter.
std::mutex libraries_mutex;  // guards the map in Libraries
std::map<std::string, std::unique_ptr<Attached>>& Libraries() {
  // The libraries are never freed, because Horovod's thread may outlive main.
  static auto* libraries = new std::map<std::string, std::unique_ptr<Attached>>;
  return *libraries;
}

}  // namespace

std::shared_ptr<recording::Recorder> Attached::LastRecorder() const { return std::atomic_load(&recorder); }

Attached& AddLibrary(const std::string& path, const std::function<void(Attached&)>& fill) {
  std::lock_guard<std::mutex> lock(libraries_mutex);
  if (const auto it = Libraries().find(path); it != Libraries().end()) return *it->second;
  auto attached = std::make_unique<Attached>();
  fill(*attached);
  return *(Libraries()[path] = std::move(attached));
}

void CountGeneration() {
  std::lock_guard<std::mutex> lock(libraries_mutex);
  for (auto& [path, attached] : Libraries())
    if (attached->is_initialized() == 0) ++attached->generation;
}

}  // namespace horovod_partial::attach
