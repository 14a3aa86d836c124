// A quorum that follows what the ranks' steps take: as many ranks as the speed allows.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "core/policy.h"
#include "core/quorum_guard.h"
#include "core/quorum_replay.h"
#include "core/step_window.h"
#include "core/types.h"

namespace horovod_partial {

// Of all buckets of a policy together: steps are a rank's, not a bucket's. It is told of the rounds of one of them, and
// is a function of what it is told. Every kPeriod rounds it takes the steps of the last rounds and replays them with
// each candidate, one in each round, so that no closing takes long.
class AutoQuorum {
 public:
  static constexpr Round kPeriod = 8;

  AutoQuorum(int size, const Policy& policy);

  // A rank has arrived, `steps` times since it was last heard of. A late one has its results at once.
  void Arrive(Rank rank, Time at, int steps, bool late);
  // A rank is out of training, as in a flush or a join, until it arrives again: that is no slow rank.
  void Leave(Rank rank);
  // No round is running any more. So the results of the last one are there.
  void Ended(Time now);
  // A round has closed, and these ranks wait for its result.
  void Close(const std::vector<bool>& on_time, Time now);
  // It wants to hear of the end of the round that has closed, although nobody else may.
  bool WantsEnd() const { return running_ && round_ % kPeriod == 0; }
  // Other rounds are told of from now on.
  void ChangeBucket();

  // Of the next round to open.
  int quorum() const { return candidates_[guard_.at()]; }
  QuorumGuard::Why why() const { return guard_.why(); }

 private:
  struct Mark {
    Time closed{0};
    std::int64_t steps = 0;  // that all ranks have made until then
  };
  void Evaluate(Time now);
  std::optional<QuorumGuard::Rate> MeasuredRate() const;
  Time Reduction() const;

  const Round max_staleness_;
  const Time grace_;
  std::vector<int> candidates_;  // quorums, all ranks first
  StepWindow window_;
  QuorumGuard guard_;
  Round round_ = 0;
  Time closed_{0};
  bool running_ = false;
  std::int64_t steps_ = 0;
  std::deque<Mark> marks_;       // of the last rounds that the present quorum has held in, without a disturbance
  Round since_ = 0;              // when that began
  bool disturbed_ = false;       // ranks have left or returned since the last closing
  std::deque<Time> reductions_;  // what the last ones took, at most
  StepSample sample_;            // in an evaluation
  std::vector<double> predicted_;
};

}  // namespace horovod_partial
