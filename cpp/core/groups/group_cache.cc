#include "core/groups/group_cache.h"

#include <algorithm>

namespace horovod_partial {

std::vector<Members> GroupCache::Use(const Members& group) {
  std::vector<Members> evicted;
  const auto known = at_.find(group);
  if (known != at_.end()) {
    order_.splice(order_.end(), order_, known->second);
    return evicted;
  }
  for (const Rank member : group) {
    if (load_[static_cast<std::size_t>(member)] < capacity_) continue;
    const auto oldest = std::find_if(order_.begin(), order_.end(), [&](const Members& other) {
      return std::binary_search(other.begin(), other.end(), member);
    });
    for (const Rank rank : *oldest) --load_[static_cast<std::size_t>(rank)];
    at_.erase(*oldest);
    evicted.push_back(std::move(*oldest));
    order_.erase(oldest);
  }
  for (const Rank rank : group) ++load_[static_cast<std::size_t>(rank)];
  at_[group] = order_.insert(order_.end(), group);
  return evicted;
}

}  // namespace horovod_partial
