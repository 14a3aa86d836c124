// The quorum of the policy Auto, which follows how long the steps of the ranks take.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "core/quorum/policy.h"
#include "core/quorum/quorum_guard.h"
#include "core/quorum/quorum_replay.h"
#include "core/quorum/step_window.h"
#include "core/values/types.h"

namespace horovod_partial {

// Chooses one quorum for all buckets of a policy, because the steps of a rank do not depend on the bucket. It observes
// the rounds of one of these buckets, and depends on nothing else. Every kPeriod rounds it predicts from recent steps
// the rate (steps per second) with each candidate quorum, one candidate in each round, so that no closing takes long.
class AutoQuorum {
 public:
  static constexpr Round kPeriod = 8;

  AutoQuorum(int size, const Policy& policy);

  // Records that a rank has arrived, `steps` times since the last call for this rank. `late` says that the arrival was
  // late, so that the rank has its results at once.
  void Arrive(Rank rank, Time at, int steps, bool late);
  // Records that a rank is out of training, as in a flush or a join, until it arrives again. It does not count as slow.
  void Leave(Rank rank);
  // Records that no round is running, so the results of the last round are there.
  void Ended(Time now);
  // Records that a round has closed. The ranks that are on time wait for its result.
  void Close(const std::vector<bool>& on_time, Time now);
  // Returns true if Ended must be called after this round, even if that needs a cycle that nothing else needs.
  bool WantsEnd() const { return running_ && round_ % kPeriod == 0; }
  // Called when the quorum is chosen from the rounds of another bucket from now on.
  void ChangeBucket();

  // The quorum of the next round, and why it was chosen.
  int quorum() const { return candidates_[guard_.at()]; }
  QuorumGuard::Why why() const { return guard_.why(); }

 private:
  struct Mark {
    Time closed{0};
    std::int64_t steps = 0;  // the steps of all ranks up to this closing
  };
  void Evaluate(Time now);
  std::optional<QuorumGuard::Rate> MeasuredRate() const;
  Time Reduction() const;

  const Round max_staleness_;
  const Time grace_;
  std::vector<int> candidates_;  // the candidate quorums, the largest (all ranks) first
  StepWindow window_;
  QuorumGuard guard_;
  Round round_ = 0;
  Time closed_{0};
  bool running_ = false;
  std::int64_t steps_ = 0;
  std::deque<Mark> marks_;  // recent closings under the present quorum, since a rank last left or returned
  Round since_ = 0;         // the first round with the present quorum, the bucket that is followed, and the same ranks
  bool disturbed_ = false;  // true if ranks have left or returned since the last closing
  std::deque<Time> reductions_;  // upper bounds of how long the last reductions took
  StepSample sample_;            // the steps from which the present predictions are made
  std::vector<double> predicted_;
};

}  // namespace horovod_partial
