#include "core/quorum/quorum_guard.h"

#include <algorithm>
#include <cmath>

namespace horovod_partial {
namespace {

constexpr std::array<int, 2> kLongestHold = {128, 24};  // the longest delays of decreases and increases, in periods
constexpr double kForgets = 0.8;  // may_hide_ falls by this factor if no larger quorum can be tried, to allow more

double Best(const std::vector<double>& predicted) { return *std::max_element(predicted.begin(), predicted.end()); }

}  // namespace

bool QuorumGuard::Evaluate(const std::vector<double>& predicted, std::optional<Rate> measured) {
  ++period_;
  if (candidates_ < 2 || Best(predicted) <= 0) return false;
  if (trial_) {
    ++trial_->periods;
    const Verdict verdict = Judge(measured);
    if (verdict == Verdict::kKept) Keep(predicted, measured);
    if (verdict == Verdict::kFailed) TakeBack(measured);
    return verdict == Verdict::kFailed;
  }
  const std::optional<std::size_t> before = vote_;
  vote_ = Wanted(predicted);
  if (vote_ && !MayGo(*vote_ > at_ ? kDown : kUp, predicted, measured)) vote_.reset();
  if (!vote_) return at_ > 0 && MayGo(kUp, predicted, measured) && Probe(predicted, measured);
  const bool down = *vote_ > at_;
  if (!before || (*before > at_) != down) return false;
  const std::size_t to = down ? std::min(*vote_, *before) : std::max(*vote_, *before);
  return Go(to, down ? Why::kFaster : Why::kAsFast, predicted, measured);
}

// Returns how wrong a measured rate may be, as a share of the rate: twice its standard error.
double QuorumGuard::Varies(const std::optional<Rate>& rate) {
  return rate && rate->value > 0 ? 2 * rate->error / rate->value : 0;
}

bool QuorumGuard::Differ(const std::optional<Rate>& one, const std::optional<Rate>& other) {
  if (!one || !other) return false;
  const auto [low, high] = std::minmax(one->value, other->value);
  return high > kNewRate * (1 + Varies(one) + Varies(other)) * low;
}

// Returns the quorum that the predictions favour, or nothing if it is the present quorum.
std::optional<std::size_t> QuorumGuard::Wanted(const std::vector<double>& predicted) const {
  const double best = Best(predicted);
  const auto largest = [&](double share) {
    return static_cast<std::size_t>(
        std::find_if(predicted.begin(), predicted.end(), [&](double rate) { return rate >= share * best; }) -
        predicted.begin());
  };
  if (predicted[at_] < kTooSlow * best && largest(kAsGood) > at_) return largest(kAsGood);
  if (largest(kGoodEnough) < at_) return largest(kGoodEnough);
  return std::nullopt;
}

// Tries the largest quorum that could be as fast as the present one, if predictions for larger quorums are too low by
// the factor may_hide_. Without a measured rate nothing is tried, because the result could not be judged.
bool QuorumGuard::Probe(const std::vector<double>& predicted, std::optional<Rate> measured) {
  if (!measured) return false;
  for (std::size_t larger = 0; larger < at_; ++larger)
    if (predicted[larger] >= may_hide_ * predicted[at_]) return Go(larger, Why::kProbe, predicted, measured);
  Hold& hold = holds_[kUp];
  hold.until = period_ + hold.periods;
  hold.promise = Promise(kUp, predicted);
  hold.rate = measured;
  may_hide_ = std::max(kMayHide, kForgets * may_hide_);
  return false;
}

// Returns the predicted gain of a new quorum: its rate of steps, divided by that of the present quorum. A smaller
// quorum counts with the best rate of all candidates, a larger quorum with the rate of a quorum of all ranks.
double QuorumGuard::Promise(Direction direction, const std::vector<double>& predicted) const {
  return (direction == kDown ? Best(predicted) : predicted[0]) / std::max(predicted[at_], 1e-9);
}

bool QuorumGuard::MayGo(Direction direction, const std::vector<double>& predicted, std::optional<Rate> measured) {
  Hold& hold = holds_[direction];
  if (period_ >= hold.until) return true;
  const bool better = Promise(direction, predicted) >= kNewLoad * (1 + Varies(measured)) * hold.promise;
  if (!better && !Differ(measured, hold.rate)) return false;
  hold = {};
  if (direction == kUp) may_hide_ = kMayHide;
  return true;
}

bool QuorumGuard::Go(std::size_t to, Why why, const std::vector<double>& predicted, std::optional<Rate> measured) {
  const double expected = predicted[to] / std::max(predicted[at_], 1e-9);
  trial_ = Trial{at_, measured, 0, Promise(to > at_ ? kDown : kUp, predicted), expected};
  at_ = to;
  why_ = why;
  vote_.reset();
  return true;
}

QuorumGuard::Verdict QuorumGuard::Judge(std::optional<Rate> measured) const {
  const bool over = trial_->periods >= kTrial;
  const bool probe = why_ == Why::kProbe;
  // A change of the quorum stays if no rate was measured before it, because only predictions could judge it.
  if (!trial_->before && !probe) return over ? Verdict::kKept : Verdict::kOpen;
  // If the new rate is not measured by the end of the longest trial, decreases of the quorum and probes (increases
  // against predictions) are undone. Other increases stay.
  const bool unproven = DirectionOf(*trial_) == kDown || probe;
  if (!trial_->before || !measured) {
    if (trial_->periods < kLongestTrial) return Verdict::kOpen;
    return unproven ? Verdict::kFailed : Verdict::kKept;
  }
  const Rate& before = *trial_->before;
  const double least = !over ? kHopeless : DirectionOf(*trial_) == kDown ? kMustGain : kMayLose;
  const double excess = measured->value - least * before.value;
  const double error = std::hypot(measured->error, least * before.error);
  if (!over) return excess < -2 * error ? Verdict::kFailed : Verdict::kOpen;
  if (excess < -error) return Verdict::kFailed;
  if (excess >= error) return Verdict::kKept;
  // The numbers of steps per second vary too much to tell which quorum is faster. So a quorum that is tried as a probe
  // stays only if the measurement confirms it, and a predicted quorum stays unless the measurement disproves it.
  if (trial_->periods < kLongestTrial && (!probe || excess >= 0)) return Verdict::kOpen;
  return probe ? Verdict::kFailed : Verdict::kKept;
}

void QuorumGuard::TakeBack(std::optional<Rate> measured) {
  const Direction direction = DirectionOf(*trial_);
  Hold& hold = holds_[direction];
  hold.until = period_ + hold.periods;
  hold.periods = std::min(2 * hold.periods, kLongestHold[direction]);
  hold.promise = trial_->promise;
  hold.rate = trial_->before;
  if (direction == kUp && trial_->before && measured && measured->value > 0) {
    // `hidden` is the measured rate divided by the predicted rate. 0.9 makes it a bit easier to try larger quorums.
    const double hidden = measured->value / trial_->before->value / trial_->expected;
    may_hide_ = std::clamp(0.9 * kMayLose / hidden, kMayHide, kMayLose);
  }
  at_ = trial_->from;
  why_ = Why::kTakenBack;
  trial_.reset();
}

void QuorumGuard::Keep(const std::vector<double>& predicted, std::optional<Rate> measured) {
  const Direction direction = DirectionOf(*trial_);
  const Direction back = direction == kDown ? kUp : kDown;
  Hold& hold = holds_[back];
  hold.until = period_ + hold.periods;
  hold.promise = Promise(back, predicted);
  hold.rate = measured;
  // If the quorum goes back and forth, the delays of changes double, so it changes less and less often.
  if (last_kept_ == back) hold.periods = std::min(2 * hold.periods, kLongestHold[back]);
  last_kept_ = direction;
  may_hide_ = kMayHide;  // reset, because predictions will now follow from steps under another quorum
  trial_.reset();
}

}  // namespace horovod_partial
