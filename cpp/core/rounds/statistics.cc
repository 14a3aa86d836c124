#include "core/rounds/statistics.h"

namespace horovod_partial {

void BucketStatistics::Record(const Closing& closing) {
  const std::size_t size = closing.contributions.size();
  if (!closing.groups.empty() && GroupsOf(closing.groups).empty()) return;  // a round without ranks does not count
  if (on_time.empty()) {
    on_time.resize(size);
    late.resize(size);
    gradients.resize(size);
    fresh.resize(size + 1);
    last_contribution_.assign(size, closing.round - 1);
  }
  ++rounds;
  ++by_reason[static_cast<std::size_t>(closing.reason)];
  ++fresh[static_cast<std::size_t>(closing.fresh())];
  for (std::size_t rank = 0; rank < size; ++rank) {
    if (!closing.Includes(static_cast<Rank>(rank))) continue;
    const auto& contribution = closing.contributions[rank];
    ++(contribution.fresh ? on_time : late)[rank];
    if (contribution.gradients == 0 || contribution.stale) continue;
    gradients[rank] += contribution.gradients;
    ++staleness[closing.round - 1 - last_contribution_[rank]];
    last_contribution_[rank] = closing.round;
  }
}

}  // namespace horovod_partial
