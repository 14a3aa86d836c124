#include "tf/library.h"

namespace horovod_partial::tf {
namespace {

std::string& Path() {
  static auto* path = new std::string;
  return *path;
}

}  // namespace

const std::string& LibraryPath() { return Path(); }

}  // namespace horovod_partial::tf

// For horovod_partial/tensorflow/graph.py.
extern "C" __attribute__((visibility("default"))) void horovod_partial_set_library(const char* path) {
  horovod_partial::tf::Path() = path;
}
