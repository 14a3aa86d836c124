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
  static constexpr int kPatience = 10;

  explicit StepRows(int size) : ranks_(static_cast<std::size_t>(size)) {}

  // A rank is waited for from its first step on. For the first step, kPatience calls of Take wait: the rank may not
  // watch its steps.
  void Add(Rank rank, const std::vector<TimedStep>& steps);
  // Says whether a rank takes no steps, because it is gone, has joined or has ended. Then nobody waits for its steps.
  // If it comes back and has missed steps meanwhile, its next step counts as one of the next row.
  void SetOut(Rank rank, bool out);
  // Returns steps for which nobody must be waited for, at most so many: the seconds of each rank, NaN for a rank
  // without the step.
  std::vector<std::vector<double>> Take(std::size_t most);

 private:
  struct Member {
    std::deque<TimedStep> steps;
    std::int64_t left_out = 0;
    bool out = false;
    bool was_out = false;  // since its last step
    bool has_begun = false;

    std::int64_t next() const { return steps.front().number - left_out; }
  };
  std::vector<Member> ranks_;
  std::int64_t row_ = 0;  // the number of the next row, at least
  int takes_ = 0;         // the number of calls of Take since the first step of any rank
};

}  // namespace horovod_partial
