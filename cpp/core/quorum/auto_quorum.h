// Chooses the quorum of the policy Auto by how long the steps of the ranks take.
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
// the rate (steps per second) with each candidate quorum. To be quick, Close makes at most one prediction.
class AutoQuorum {
 public:
  static constexpr Round kPeriod = 8;

  AutoQuorum(int size, const Policy& policy);

  // Records that a rank has arrived, `steps` times since the last call for this rank. If the arrival was `late`, the
  // rank gets missed results and begins its next step without waiting for others.
  void Arrive(Rank rank, Time at, int steps, bool late);
  // Records that a rank is out of training until it arrives again, as in a flush or a join. It does not count as slow.
  void Leave(Rank rank);
  // Records that no round is running: the reduction of the last round has ended. This shows how long reductions take.
  void Ended(Time now);
  // Records that a round has closed. `on_time`: true for each rank that is on time. Such a rank waits for the result.
  void Close(const std::vector<bool>& on_time, Time now);
  // Returns true if Ended must be called when this round has ended, even if nothing else needs another cycle.
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
  std::deque<Mark> marks_;  // recent closings under the present quorum, with the same ranks in training
  Round since_ = 0;         // the first round since the quorum, the measured bucket or the ranks in training changed
  bool disturbed_ = false;  // true if ranks have left training or returned to it since the last closing
  std::deque<Time> reductions_;  // upper bounds of how long the last reductions took
  StepSample sample_;            // the recent steps from which the rate of each quorum is predicted
  std::vector<double> predicted_;
};

}  // namespace horovod_partial
