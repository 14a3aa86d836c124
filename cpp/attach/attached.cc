#include "attach/attached.h"

#include <map>
#include <mutex>
#include <utility>

namespace horovod_partial::attach {
namespace {

// A thread that holds this mutex waits neither for other ranks nor for the lock of Python's interpreter.
std::mutex libraries_mutex;  // guards `libraries`
// The libraries, by path. They are never freed, because Horovod's thread may outlive main.
auto& libraries = *new std::map<std::string, std::unique_ptr<Attached>>;

}  // namespace

std::shared_ptr<recording::Recorder> Attached::LastRecorder() const { return std::atomic_load(&recorder); }

Attached& AddLibrary(const std::string& path, const std::function<void(Attached&)>& fill) {
  std::lock_guard<std::mutex> lock(libraries_mutex);
  if (const auto it = libraries.find(path); it != libraries.end()) return *it->second;
  auto attached = std::make_unique<Attached>();
  fill(*attached);
  return *(libraries[path] = std::move(attached));
}

void CountGeneration() {
  std::lock_guard<std::mutex> lock(libraries_mutex);
  for (auto& [path, attached] : libraries)
    if (attached->is_initialized() == 0) ++attached->generation;
}

}  // namespace horovod_partial::attach
