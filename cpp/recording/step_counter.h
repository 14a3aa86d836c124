// Numbers the steps of a training by the names that come: each step has the same ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace horovod_partial::recording {

// A name that comes again begins the next step. Not thread-safe.
class StepCounter {
 public:
  // Returns the number, from 0, of the step to which all these names belong.
  std::int64_t Count(const std::vector<std::string>& names) {
    std::vector<std::size_t> hashes;  // two names with one hash begin a step too early; nothing worse happens
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
  static constexpr std::size_t kMostNames = 1 << 20;  // of a step; a program with more gives each operation a new name
  std::unordered_set<std::size_t> seen_;
  std::int64_t step_ = 0;
};

}  // namespace horovod_partial::recording
