#include "core/slowness/step_timer.h"

#include <algorithm>
#include <limits>
#include <optional>
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

void StepRows::Add(Rank rank, const std::vector<TimedStep>& steps) {
  if (steps.empty()) return;
  Member& member = ranks_[static_cast<std::size_t>(rank)];
  member.has_begun = true;
  if (std::exchange(member.was_out, false) && member.steps.empty())
    member.left_out = std::min(member.left_out, steps.front().number - row_);
  member.steps.insert(member.steps.end(), steps.begin(), steps.end());
  while (member.steps.size() > kMostAhead) {
    const std::int64_t first = member.steps.front().number;
    member.steps.pop_front();
    member.left_out += member.steps.front().number - first;
  }
}

void StepRows::SetOut(Rank rank, bool out) {
  Member& member = ranks_[static_cast<std::size_t>(rank)];
  member.out = out;
  if (out) member.was_out = true;
}

std::vector<std::vector<double>> StepRows::Take(std::size_t most) {
  std::vector<std::vector<double>> rows;
  const auto has_begun = [](const Member& member) { return member.has_begun; };
  if (takes_ < kPatience && std::any_of(ranks_.begin(), ranks_.end(), has_begun)) ++takes_;
  const bool waits_for_all = takes_ < kPatience;
  const auto holds_up = [waits_for_all](const Member& member) {
    return member.steps.empty() && !member.out && (member.has_begun || waits_for_all);
  };
  while (rows.size() < most && std::none_of(ranks_.begin(), ranks_.end(), holds_up)) {
    std::optional<std::int64_t> number;
    for (const Member& member : ranks_)
      if (!member.steps.empty()) number = std::min(number.value_or(member.next()), member.next());
    if (!number) break;
    std::vector<double> row(ranks_.size(), std::numeric_limits<double>::quiet_NaN());
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      Member& member = ranks_[rank];
      if (member.steps.empty() || member.next() != *number) continue;
      row[rank] = member.steps.front().seconds;
      member.steps.pop_front();
    }
    rows.push_back(std::move(row));
    row_ = *number + 1;
  }
  return rows;
}

}  // namespace horovod_partial
