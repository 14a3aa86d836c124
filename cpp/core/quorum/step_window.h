// Keeps how long the steps of the ranks have taken in the last rounds of a bucket.
#pragma once

#include <vector>

#include "core/quorum/quorum_replay.h"
#include "core/values/types.h"

namespace horovod_partial {

class StepWindow {
 public:
  static constexpr Round kRounds = 64;

  explicit StepWindow(int size) : ranks_(static_cast<std::size_t>(size)) {}
  int size() const { return static_cast<int>(ranks_.size()); }

  // Records that a rank has its result, so its next step begins.
  void Begin(Rank rank, Time at) { At(rank).began = at; }
  // Records that the rank has arrived `steps` times since its step began. These steps count as equally long.
  void End(Rank rank, Round round, Time at, int steps);
  // Records that the rank is out of training. What it does until it returns counts as no step.
  void Leave(Rank rank);
  bool IsOut(Rank rank) const { return ranks_[static_cast<std::size_t>(rank)].out; }
  void Return(Rank rank) { At(rank).out = false; }

  // Returns the steps of all ranks that train, from the kRounds rounds before `round`. A step that has not ended counts
  // with its time so far, if that is longer than the other steps of the rank. The few longest delays are left out,
  // because a pause of the system is no reason to change the quorum.
  StepSample Sample(Round round, Time now) const;

 private:
  struct Step {
    Round round;
    Time length;
  };
  struct RankSteps {
    std::vector<Step> steps;  // a ring buffer of the newest steps
    std::size_t next = 0;
    Time began = kNever;  // when the present step began; kNever if the rank waits or is out of training
    bool out = false;
  };
  RankSteps& At(Rank rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  std::vector<RankSteps> ranks_;
};

}  // namespace horovod_partial
