// A quorum that follows the ranks' step times: as many ranks as the speed allows.
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

// Serves all buckets of a policy together, because a rank's steps do not depend on the bucket. It hears of the rounds
// of one of them, and depends on nothing else. Every kPeriod rounds it takes the steps of the last rounds and predicts
// the rate for each candidate quorum. It predicts for one candidate in each round, so that no closing takes long.
class AutoQuorum {
 public:
  static constexpr Round kPeriod = 8;

  AutoQuorum(int size, const Policy& policy);

  // A rank has arrived `steps` times since the last call for it. `late`: it was late, and has its results at once.
  void Arrive(Rank rank, Time at, int steps, bool late);
  // A rank is out of training, for example in a flush or a join, until it arrives again. It does not count as slow.
  void Leave(Rank rank);
  // No round is running any more, so the results of the last one are there.
  void Ended(Time now);
  // A round has closed. The ranks that are on time wait for its result.
  void Close(const std::vector<bool>& on_time, Time now);
  // True if it needs a call of Ended for the round that has closed, even if nobody else wants a cycle then.
  bool WantsEnd() const { return running_ && round_ % kPeriod == 0; }
  // From now on it hears of the rounds of another bucket.
  void ChangeBucket();

  // The quorum of the next round to open, and why it was chosen.
  int quorum() const { return candidates_[guard_.at()]; }
  QuorumGuard::Why why() const { return guard_.why(); }

 private:
  struct Mark {
    Time closed{0};
    std::int64_t steps = 0;  // steps of all ranks until then
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
  std::deque<Mark> marks_;       // the last rounds under the present quorum, without a disturbance
  Round since_ = 0;              // the round of the last change of quorum or bucket, or of the last disturbance
  bool disturbed_ = false;       // ranks have left or returned since the last closing
  std::deque<Time> reductions_;  // upper bounds of the last reductions' times
  StepSample sample_;            // input of the evaluation under way
  std::vector<double> predicted_;
};

}  // namespace horovod_partial
