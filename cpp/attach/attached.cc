#include "attach/attached.h"

#include <map>
#include <mutex>
#include <utility>

#include "attach/hooks.h"
#include "attach/library.h"

namespace horovod_partial::attach {
namespace {

// The mangled name of std::string depends on the string ABI of the framework.
const std::string kString = _GLIBCXX_USE_CXX11_ABI ? "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE" : "Ss";
const std::string kEnqueueTensorAllreduce =
    "_ZN7horovod6common22EnqueueTensorAllreduceESt10shared_ptrINS0_9OpContextEES1_INS0_6TensorEES5_NS0_"
    "14ReadyEventListE" +
    kString + "iSt8functionIFvRKNS0_6StatusEEENS0_8ReduceOpEddi";

// A thread that holds this mutex waits neither for other ranks nor for the lock of Python's interpreter.
std::mutex libraries_mutex;  // guards `libraries`
// The libraries, by path. They are never freed, because Horovod's thread may outlive main.
auto& libraries = *new std::map<std::string, std::unique_ptr<Attached>>;

}  // namespace

std::shared_ptr<recording::Recorder> Attached::LastRecorder() const { return std::atomic_load(&recorder); }

Attached& Attach(const std::string& library_path, bool waits_are_told) {
  std::lock_guard<std::mutex> lock(libraries_mutex);
  if (const auto it = libraries.find(library_path); it != libraries.end()) return *it->second;
  const Library library(library_path);
  auto attached = std::make_unique<Attached>();
  attached->enqueue = reinterpret_cast<decltype(attached->enqueue)>(library.Symbol(kEnqueueTensorAllreduce));
  attached->is_initialized = reinterpret_cast<int (*)()>(library.Symbol("horovod_is_initialized"));
  attached->waits_are_told = waits_are_told;
  InstallHooks(library);
  return *(libraries[library_path] = std::move(attached));
}

void CountGeneration() {
  std::lock_guard<std::mutex> lock(libraries_mutex);
  for (auto& [path, attached] : libraries)
    if (attached->is_initialized() == 0) ++attached->generation;
}

}  // namespace horovod_partial::attach
