#include "core/slowness/step_timer.h"

#include <algorithm>
#include <utility>

namespace horovod_partial {

void Blocked::Add(Time begin, Time end) {
  while (!spans_.empty() && spans_.back().second >= begin) {  // of waits on two threads, one may lie in the other
    begin = std::min(begin, spans_.back().first);
    end = std::max(end, spans_.back().second);
    spans_.pop_back();
  }
  spans_.emplace_back(begin, end);
  if (spans_.size() > kMost) spans_.pop_front();
}

void Blocked::ForgetBefore(Time time) {
  while (!spans_.empty() && spans_.front().second <= time) spans_.pop_front();
}

Time Blocked::Within(Time begin, Time end) const {
  Time sum{0};
  for (const auto& [first, last] : spans_) sum += std::max(std::min(last, end) - std::max(first, begin), Time(0));
  return sum;
}

void ArrivalSteps::Arrived(std::int64_t step, Time time) {
  if (step != step_) {
    if (begin_ && handed_ > *begin_) ended_.Add(*step_, handed_ - *begin_ - blocked_.Within(*begin_, handed_));
    // Micro-batches of work sharing have one result together, so one may begin with the arrival of the one before.
    if (step_) begin_ = std::min(std::max(resumed_, handed_), time);
    step_ = step;
    blocked_.ForgetBefore(begin_.value_or(time));
  }
  handed_ = std::max(handed_, time);
}

void ArrivalSteps::Waited(Time begin, Time end, bool for_round) {
  if (for_round) Got(end);
  blocked_.Add(begin, end);
}

void ReductionSteps::Handed(Time time) {
  handed_.push_back(time);
  if (handed_.size() > kMostHanded) handed_.pop_front();
}

void ReductionSteps::Reduced(std::int64_t step, Time begin, Time end) {
  if (step_ && step != *step_) {
    const auto after = std::upper_bound(handed_.begin(), handed_.end(), last_begin_);
    // If the rank handed over no tensors, it takes no step of its own: it has called `join`.
    if (begin_ && after != handed_.begin() && *std::prev(after) > *begin_) {
      const Time handed = *std::prev(after);
      ended_.Add(*step_, handed - *begin_ - blocked_.Within(*begin_, handed));
    }
    handed_.erase(handed_.begin(), after);
    begin_ = last_end_;
    last_end_ = end;
    blocked_.ForgetBefore(*begin_);
  }
  step_ = step;
  last_begin_ = begin;
  last_end_ = std::max(last_end_, end);
}

void StepTimer::Arrived(std::int64_t step, Time time, std::size_t bytes) {
  arrived_ += bytes;
  arrivals_.Arrived(step, time);
}

void StepTimer::Waited(Time begin, Time end, bool for_round) {
  arrivals_.Waited(begin, end, for_round);
  reductions_.Waited(begin, end);
}

void StepTimer::Reduced(std::int64_t step, Time begin, Time end, std::size_t bytes) {
  reduced_ += bytes;
  reductions_.Reduced(step, begin, end);
}

StepReport StepTimer::Take() {
  std::vector<TimedStep> arrivals = arrivals_.Take(), reductions = reductions_.Take();
  const std::size_t before = std::exchange(reported_, arrived_ + reduced_);
  return {std::move(arrived_ > reduced_ ? arrivals : reductions), static_cast<std::int64_t>(reported_ - before)};
}

}  // namespace horovod_partial
