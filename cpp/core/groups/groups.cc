#include "core/groups/groups.h"

#include <algorithm>
#include <numeric>

namespace horovod_partial {

std::vector<Members> GroupsOf(const Partition& partition) {
  std::vector<Members> groups;
  for (std::size_t rank = 0; rank < partition.size(); ++rank) {
    if (partition[rank] == kNoGroup) continue;
    const auto number = static_cast<std::size_t>(partition[rank]);
    if (groups.size() <= number) groups.resize(number + 1);
    groups[number].push_back(static_cast<Rank>(rank));
  }
  groups.erase(std::remove(groups.begin(), groups.end(), Members()), groups.end());
  return groups;
}

Members GroupOf(const Partition& partition, Rank rank, int size) {
  Members members;
  if (partition.empty()) {
    members.resize(static_cast<std::size_t>(size));
    std::iota(members.begin(), members.end(), 0);
    return members;
  }
  const int number = partition.at(Index(rank));
  if (number == kNoGroup) return members;
  for (std::size_t other = 0; other < partition.size(); ++other)
    if (partition[other] == number) members.push_back(static_cast<Rank>(other));
  return members;
}

int PlaceOf(const Members& members, Rank rank) {
  return static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
}

Partition PartitionOf(const std::vector<Members>& groups, int size) {
  Partition partition(static_cast<std::size_t>(size), kNoGroup);
  for (std::size_t number = 0; number < groups.size(); ++number)
    for (const Rank rank : groups[number]) partition.at(Index(rank)) = static_cast<int>(number);
  return partition;
}

std::vector<Members> GroupCache::Use(const Members& group) {
  std::vector<Members> evicted;
  const auto known = at_.find(group);
  if (known != at_.end()) {
    order_.splice(order_.end(), order_, known->second);
    return evicted;
  }
  for (const Rank member : group) {
    if (load_[Index(member)] < capacity_) continue;
    const auto oldest = std::find_if(order_.begin(), order_.end(), [&](const Members& other) {
      return std::binary_search(other.begin(), other.end(), member);
    });
    for (const Rank rank : *oldest) --load_[Index(rank)];
    at_.erase(*oldest);
    evicted.push_back(std::move(*oldest));
    order_.erase(oldest);
  }
  for (const Rank rank : group) ++load_[Index(rank)];
  at_[group] = order_.insert(order_.end(), group);
  return evicted;
}

}  // namespace horovod_partial
