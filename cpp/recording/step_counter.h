// Which step is it? A training does the same things in each one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace horovod_partial::recording {

// What comes again begins the next step. Not thread-safe.
class StepCounter {
 public:
  // The number, from 0, of the step in which all these have come.
  std::int64_t Count(const std::vector<std::string>& names) {
    std::vector<std::size_t> hashes;  // names that share one begin a step too early, and nothing more
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
  static constexpr std::size_t kMostNames = 1 << 20;  // of a step; a program that has more names each operation anew
  std::unordered_set<std::size_t> seen_;
  std::int64_t step_ = 0;
};

}  // namespace horovod_partial::recording
