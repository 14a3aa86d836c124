// Lines up the steps of the ranks, so that they can be compared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "core/slowness/step_timer.h"
#include "core/values/types.h"

namespace horovod_partial {

// Steps are lined up by their numbers. Under a policy that does not wait for slow ranks, a fast rank may be far ahead.
// When it is kMostAhead steps ahead, its oldest step is left out, and its later steps count as one step earlier.
class StepRows {
 public:
  static constexpr std::size_t kMostAhead = 4096;

  explicit StepRows(int size) : ranks_(static_cast<std::size_t>(size)) {}

  void Add(Rank rank, const std::vector<TimedStep>& steps);
  // Says whether a rank takes no steps, because it is gone, has joined or has ended. Nobody waits for its steps.
  void SetOut(Rank rank, bool out) { ranks_[static_cast<std::size_t>(rank)].out = out; }
  // Returns the steps for which nobody must be waited for: the seconds of each rank, NaN for a rank without the step.
  std::vector<std::vector<double>> Take();

 private:
  struct Member {
    std::deque<TimedStep> steps;
    std::int64_t left_out = 0;
    bool out = false;

    std::int64_t next() const { return steps.front().number - left_out; }
  };
  std::vector<Member> ranks_;
};

}  // namespace horovod_partial
