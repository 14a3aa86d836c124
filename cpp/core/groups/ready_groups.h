// Forms groups of the ranks that are ready first, and prevents groups that never change.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "core/groups/groups.h"
#include "core/values/types.h"

namespace horovod_partial {

// Forms groups by P-Reduce's rule: first come, first served. By this rule alone, ranks of equal speed would always find
// the same partners, and parts of the job would never exchange their models. (P-Reduce calls this "update isolation".
// The paper publishes no rule against it; what follows is ours.) A group connects its ranks with each other, and with
// all ranks that other recent groups connect to them. The last `window` groups shall connect all ranks that train.
// While they leave the job in several unconnected parts, ranks of different parts are grouped first. If all candidates
// belong to one part, they are held until a rank of another part arrives, but no longer than their last step took. If
// they were held in vain, their part is not held again until all ranks have been connected.
class ReadyGroups {
 public:
  struct Candidate {
    Rank rank;
    Time hold_until;  // until when this rank may be held back, to meet a rank that recent groups do not connect to it
  };

  ReadyGroups(int size, int group_size, int window);

  // Forms groups of `candidates`: the ranks that have arrived, in order of arrival. `active`: whether each rank trains.
  std::vector<Members> Form(std::vector<Candidate> candidates, const std::vector<bool>& active, Time now);
  // Records a group that Form has not made, so that it counts among the last groups, which shall connect all ranks.
  void Add(const Members& group, const std::vector<bool>& active);

  // Returns until when a rank is held back to meet a rank of another part of the job; kNever if no rank is held back.
  // Form must be called again at that time, even if no other rank has arrived.
  Time hold_until() const { return hold_until_; }
  // Add checks, after each new group, whether the last `window` groups connect all ranks that train. Returns how often
  // they did not.
  std::int64_t unconnected() const { return unconnected_; }

 private:
  // Returns for each rank the part of the job that contains it, named by one rank of the part. Parts are the connected
  // components that the last `groups` groups make of the ranks.
  std::vector<Rank> Parts(std::size_t groups) const;
  bool Connected(const std::vector<Rank>& parts, const std::vector<bool>& active) const;

  const int size_;
  const std::size_t group_size_;
  const std::size_t window_;
  std::deque<Members> history_;       // the last `window_` groups of ranks that were formed
  std::vector<bool> waited_in_vain_;  // for each rank: true if it was held in vain for a rank of another part
  Time hold_until_ = kNever;
  std::int64_t unconnected_ = 0;
};

}  // namespace horovod_partial
