#include "core/slowness/step_rows.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace horovod_partial {

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
