#include "core/quorum/quorum_replay.h"

#include <algorithm>
#include <cstdint>

#include "core/quorum/grace.h"

namespace horovod_partial {
namespace {

constexpr int kSpans = 3;
constexpr int kMostRounds = 512;      // the most rounds simulated, enough if a step is as long as hundreds of others
constexpr int kMostVisits = 1 << 17;  // the most rounds times ranks to simulate, so that no prediction takes long

// Simulates ranks that repeat their recent steps, to predict their rate under a quorum. All ranks begin at time 0.
class Replayed {
 public:
  Replayed(const StepSample& sample, const QuorumRule& rule)
      : sample_(sample), rule_(rule), lanes_(sample.ranks()), on_time_(sample.ranks()) {
    for (std::size_t rank = 0; rank < lanes_.size(); ++rank) {
      lanes_[rank].next = sample.begin[rank];
      lanes_[rank].arrives = TakeStep(rank);
    }
  }

  Time now() const { return now_; }
  std::int64_t steps() const { return steps_; }

  void CloseRound() {
    now_ = EndOfRound();
    const Time results = now_ + sample_.reduction;
    for (std::size_t rank = 0; rank < lanes_.size(); ++rank) {
      Lane& lane = lanes_[rank];
      if (on_time_[rank] <= now_) {
        steps_ += lane.behind ? 2 : 1;
        if (lane.behind) TakeStep(rank);
        lane.arrives = results + TakeStep(rank);
        lane.behind = false;
        lane.missed = 0;
        continue;
      }
      if (lane.behind && lane.arrives <= now_) {  // the rank was late, and this round takes its contribution
        ++steps_;
        TakeStep(rank);
        lane.arrives = on_time_[rank];
        lane.missed = 0;
      } else {
        ++lane.missed;
      }
      lane.behind = true;
      // A rank that arrives while a round runs waits for the end of the round.
      if (lane.arrives < results) lane.arrives = results;
    }
  }

 private:
  struct Lane {
    Time arrives{0};
    std::size_t next = 0;  // the index of the next step of the rank
    bool behind = false;   // true if the next arrival of the rank is late
    Round missed = 0;      // the number of rounds in a row without a contribution of the rank
  };

  std::size_t After(std::size_t rank) const {
    const std::size_t next = lanes_[rank].next + 1;
    return next == sample_.begin[rank + 1] ? sample_.begin[rank] : next;
  }
  Time TakeStep(std::size_t rank) {
    const Time step = sample_.steps[lanes_[rank].next];
    lanes_[rank].next = After(rank);
    return step;
  }

  Time EndOfRound() {
    Time stale{0};
    for (std::size_t rank = 0; rank < lanes_.size(); ++rank) {
      const Lane& lane = lanes_[rank];
      on_time_[rank] = lane.arrives + (lane.behind ? sample_.steps[lane.next] : Time(0));
      if (lane.missed >= rule_.max_staleness) stale = std::max(stale, lane.arrives);
    }
    order_ = on_time_;
    const auto quorum = std::min(static_cast<std::size_t>(rule_.quorum), order_.size());
    const auto last = order_.begin() + static_cast<std::ptrdiff_t>(quorum - 1);
    std::nth_element(order_.begin(), last, order_.end());
    return LastWithin(std::max(*last, stale));
  }

  // Returns when a round closes if its policy is satisfied at `satisfied`: when all ranks have arrived, or after the
  // grace. Automatic grace ends with the last arrival within its cap. It is 0 unless most missing ranks meet the cap.
  Time LastWithin(Time satisfied) const {
    const bool learns = rule_.grace == Policy::kAutomaticGrace;
    const Time end = satisfied + (learns ? GraceEstimator::CapOf(sample_.usual) : rule_.grace);
    std::size_t missing = 0, within = 0;
    Time latest = satisfied;
    for (const Time arrival : on_time_) {
      if (arrival <= satisfied) continue;
      ++missing;
      if (arrival > end) continue;
      ++within;
      latest = std::max(latest, arrival);
    }
    if (within == missing) return latest;
    if (!learns) return end;
    return 2 * within > missing ? latest : satisfied;
  }

  const StepSample& sample_;
  const QuorumRule& rule_;
  std::vector<Lane> lanes_;
  std::vector<Time> on_time_;  // when each rank arrives at the open round
  std::vector<Time> order_;
  Time now_{0};
  std::int64_t steps_ = 0;
};

}  // namespace

double PredictRate(const StepSample& sample, const QuorumRule& rule) {
  if (sample.ranks() == 0) return 0;
  Replayed replayed(sample, rule);
  Time began{0};
  std::int64_t before = 0;
  bool counts = false;
  const int most = std::clamp(kMostVisits / static_cast<int>(sample.ranks()), kSpans * 32, kMostRounds);
  for (int round = 0; round < most && replayed.now() < kSpans * sample.span; ++round) {
    replayed.CloseRound();
    if (counts || (replayed.now() < sample.span && round < most / kSpans)) continue;
    counts = true;
    began = replayed.now();
    before = replayed.steps();
  }
  const double seconds = std::chrono::duration<double>(replayed.now() - began).count();
  return seconds > 0 ? static_cast<double>(replayed.steps() - before) / seconds : 0;
}

}  // namespace horovod_partial
