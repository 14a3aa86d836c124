#include "core/groups/ready_groups.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace horovod_partial {
ReadyGroups::ReadyGroups(int size, int group_size, int window)
    : size_(size),
      group_size_(static_cast<std::size_t>(std::min(group_size, size))),
      window_(static_cast<std::size_t>(window)),
      waited_in_vain_(Index(size), false) {}

std::vector<Rank> ReadyGroups::Parts(std::size_t groups) const {
  std::vector<Rank> parent(Index(size_));
  std::iota(parent.begin(), parent.end(), 0);
  const auto root = [&](Rank rank) {
    while (parent[Index(rank)] != rank) rank = parent[Index(rank)] = parent[Index(parent[Index(rank)])];
    return rank;
  };
  for (std::size_t i = history_.size() - std::min(groups, history_.size()); i < history_.size(); ++i)
    for (const Rank rank : history_[i]) parent[Index(root(rank))] = root(history_[i].front());
  std::vector<Rank> parts;
  for (Rank rank = 0; rank < size_; ++rank) parts.push_back(root(rank));
  return parts;
}

bool ReadyGroups::Connected(const std::vector<Rank>& parts, const std::vector<bool>& active) const {
  std::set<Rank> seen;
  for (Rank rank = 0; rank < size_; ++rank)
    if (active[Index(rank)]) seen.insert(parts[Index(rank)]);
  return seen.size() <= 1;
}

void ReadyGroups::Add(const Members& group, const std::vector<bool>& active) {
  auto parts = Parts(window_ - 1);
  for (const Rank rank : group) {  // the parts of the job that have ranks in the group become one part
    const Rank old = parts[Index(rank)];
    std::replace(parts.begin(), parts.end(), old, parts[Index(group.front())]);
  }
  const bool connected = Connected(parts, active);
  history_.push_back(group);
  if (history_.size() > window_) history_.pop_front();
  if (history_.size() == window_ && !connected) ++unconnected_;
  if (connected) waited_in_vain_.assign(waited_in_vain_.size(), false);
}

std::vector<Members> ReadyGroups::Form(std::vector<Candidate> candidates, const std::vector<bool>& active, Time now) {
  std::vector<Members> groups;
  hold_until_ = kNever;
  while (candidates.size() >= group_size_) {
    auto parts = Parts(window_ - 1);  // a new group and the last `window_ - 1` groups together shall connect all ranks
    const bool connected = Connected(parts, active);
    // If these groups connect all ranks already, half of them shall do so too. Then no rank must be held back later.
    if (connected) parts = Parts(window_ / 2);
    std::vector<std::size_t> chosen = {0};
    std::set<Rank> chosen_parts = {parts[Index(candidates[0].rank)]};
    for (std::size_t i = 1; i < candidates.size() && chosen.size() < group_size_; ++i)
      if (chosen_parts.insert(parts[Index(candidates[i].rank)]).second) chosen.push_back(i);
    const bool one_part = !connected && chosen.size() == 1 && group_size_ > 1;
    if (one_part && !waited_in_vain_[Index(candidates[0].rank)]) {
      if (now < candidates[0].hold_until) {
        hold_until_ = candidates[0].hold_until;
        break;
      }
      for (Rank rank = 0; rank < size_; ++rank)
        if (parts[Index(rank)] == *chosen_parts.begin()) waited_in_vain_[Index(rank)] = true;
    }
    for (std::size_t i = 1; i < candidates.size() && chosen.size() < group_size_; ++i)
      if (std::find(chosen.begin(), chosen.end(), i) == chosen.end()) chosen.push_back(i);
    std::sort(chosen.begin(), chosen.end());
    Members group;
    for (auto at = chosen.rbegin(); at != chosen.rend(); ++at) {
      group.push_back(candidates[*at].rank);
      candidates.erase(candidates.begin() + static_cast<std::ptrdiff_t>(*at));
    }
    std::sort(group.begin(), group.end());
    Add(group, active);
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace horovod_partial
