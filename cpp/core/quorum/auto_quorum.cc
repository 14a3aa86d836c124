#include "core/quorum/auto_quorum.h"

#include <algorithm>
#include <cmath>

namespace horovod_partial {
namespace {

constexpr Round kWarmUp = 4;        // steps in this many first rounds do not count: ranks compile, allocate, read data
constexpr Round kTransition = 2;    // how many rounds after a change of quorum, bucket or ranks count for no rate
constexpr std::size_t kMarks = 25;  // a rate is measured from at most this many closings, with 24 rounds between them
constexpr std::size_t kFewest = 6;  // the least number of closings from which a rate is computed
constexpr std::size_t kReductions = 16;

int ShareOf(int size, int eighths) { return (size * eighths + 7) / 8; }

// Returns the candidate quorums, from all ranks down to `least`.
std::vector<int> CandidatesOf(int size, int least) {
  std::vector<int> candidates;
  least = std::min(least, size);
  for (const int quorum : {size, ShareOf(size, 7), ShareOf(size, 6), ShareOf(size, 4), ShareOf(size, 2), 1}) {
    const int candidate = std::max(quorum, least);
    if (candidates.empty() || candidate < candidates.back()) candidates.push_back(candidate);
  }
  return candidates;
}

}  // namespace

AutoQuorum::AutoQuorum(int size, const Policy& policy)
    : max_staleness_(policy.max_staleness),
      grace_(policy.grace),
      candidates_(CandidatesOf(size, policy.quorum)),
      window_(size),
      guard_(candidates_.size()) {}

void AutoQuorum::Arrive(Rank rank, Time at, int steps, bool late) {
  if (window_.IsOut(rank)) {
    window_.Return(rank);
    disturbed_ = true;
  }
  steps_ += steps;
  window_.End(rank, round_, at, steps);
  if (late) window_.Begin(rank, std::max(at, closed_ + Reduction()));
}

void AutoQuorum::Leave(Rank rank) {
  if (window_.IsOut(rank)) return;
  window_.Leave(rank);
  disturbed_ = true;
}

void AutoQuorum::Ended(Time now) {
  if (!running_) return;
  running_ = false;
  reductions_.push_back(now - closed_);
  if (reductions_.size() > kReductions) reductions_.pop_front();
}

// Returns how long a reduction takes: the shortest of the last ones, because their ends may be noticed late.
Time AutoQuorum::Reduction() const {
  return reductions_.empty() ? Time(0) : *std::min_element(reductions_.begin(), reductions_.end());
}

void AutoQuorum::ChangeBucket() {
  window_ = StepWindow(window_.size());
  marks_.clear();
  since_ = round_;
  sample_ = {};
  guard_.EndTrial();
}

void AutoQuorum::Close(const std::vector<bool>& on_time, Time now) {
  ++round_;
  closed_ = now;
  running_ = true;
  if (disturbed_) {
    marks_.clear();
    since_ = round_;
    disturbed_ = false;
  }
  if (round_ >= since_ + kTransition) marks_.push_back({now, steps_});
  if (marks_.size() > kMarks) marks_.pop_front();
  if (round_ >= kWarmUp)
    for (Rank rank = 0; rank < window_.size(); ++rank)
      if (on_time[static_cast<std::size_t>(rank)]) window_.Begin(rank, now + Reduction());
  Evaluate(now);
}

void AutoQuorum::Evaluate(Time now) {
  if (round_ % kPeriod == 0) {
    sample_ = window_.Sample(round_, now);
    sample_.reduction = Reduction();
    predicted_.clear();
    return;
  }
  if (sample_.ranks() == 0) return;
  predicted_.push_back(PredictRate(sample_, {candidates_[predicted_.size()], max_staleness_, grace_}));
  if (predicted_.size() < candidates_.size()) return;
  sample_ = {};
  if (!guard_.Evaluate(predicted_, MeasuredRate())) return;
  marks_.clear();
  since_ = round_;
}

// Returns the steps per second in the last rounds, with a standard error from the differences between these rounds.
std::optional<QuorumGuard::Rate> AutoQuorum::MeasuredRate() const {
  if (marks_.size() < kFewest) return std::nullopt;
  const auto seconds = [](const Mark& from, const Mark& to) {
    return std::chrono::duration<double>(to.closed - from.closed).count();
  };
  const double all = seconds(marks_.front(), marks_.back());
  if (all <= 0) return std::nullopt;
  const double rate = static_cast<double>(marks_.back().steps - marks_.front().steps) / all;
  double squares = 0;
  for (std::size_t i = 1; i < marks_.size(); ++i) {
    const double expected = rate * seconds(marks_[i - 1], marks_[i]);
    const double residual = static_cast<double>(marks_[i].steps - marks_[i - 1].steps) - expected;
    squares += residual * residual;
  }
  const auto rounds = static_cast<double>(marks_.size() - 1);
  return QuorumGuard::Rate{rate, std::sqrt(squares * rounds / (rounds - 1)) / all};
}

}  // namespace horovod_partial
