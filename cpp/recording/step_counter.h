// Counts the steps of a training by the names of the tensors that are reduced: each step has the same names.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace horovod_partial::recording {

// A tensor name that comes again begins the next step. Not thread-safe.
class StepCounter {
 public:
  // Returns the number of the step, from 0, in which all tensors of these names are reduced.
  std::int64_t Count(const std::vector<std::string>& names) {
    std::vector<std::size_t> hashes;  // if two names have one hash, a step begins too early, but nothing worse happens
    for (const std::string& name : names) hashes.push_back(std::hash<std::string>{}(name));
    const bool is_full = seen_.size() >= kMostNames;
    if (is_full ||
        std::any_of(hashes.begin(), hashes.end(), [this](std::size_t hash) { return seen_.count(hash) > 0; })) {
      seen_.clear();
      ++step_;
    }
    seen_.insert(hashes.begin(), hashes.end());
    return step_;
  }

 private:
  // The largest number of names in a step. It bounds the memory if a program gives each operation a new name.
  static constexpr std::size_t kMostNames = 1 << 20;
  std::unordered_set<std::size_t> seen_;
  std::int64_t step_ = 0;
};

}  // namespace horovod_partial::recording
