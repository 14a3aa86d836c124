// Forms groups of the ranks that are ready first, and prevents cliques.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "core/groups/groups.h"
#include "core/values/types.h"

namespace horovod_partial {

// P-Reduce's controller: first come, first served. Ranks of equal speed would always find the same partners, and parts
// of the job would never exchange anything. So the last `window` groups shall connect all active ranks (P-Reduce's
// "update isolation"; the paper's own rule is not published, this one is ours). While they do not, ranks of different
// parts are grouped in preference. If all candidates are of one part, they are held until a rank of another part comes,
// but no longer than their last step took. A part that has waited in vain is not held again until the window has
// connected all.
class ReadyGroups {
 public:
  struct Candidate {
    Rank rank;
    Time hold_until;  // it waits no longer than until then for a rank of another part
  };

  ReadyGroups(int size, int group_size, int window);

  // Forms groups of `candidates`, which are in the order of their arrival. `active`: by rank, whether it trains.
  std::vector<Members> Form(std::vector<Candidate> candidates, const std::vector<bool>& active, Time now);
  // Adds a group that was formed elsewhere. It counts like the others.
  void Add(const Members& group, const std::vector<bool>& active);

  // When to call Form again although no rank has arrived: the end of a hold, or kNever.
  Time hold_until() const { return hold_until_; }
  std::int64_t formed() const { return formed_; }
  // How often the last `window` groups did not connect all active ranks.
  std::int64_t unconnected() const { return unconnected_; }

 private:
  // Returns by rank the part that it belongs to; one of a part's ranks stands for the part. Parts are the connected
  // components of the last groups, at most `groups` of them.
  std::vector<Rank> Parts(std::size_t groups) const;
  bool Connected(const std::vector<Rank>& parts, const std::vector<bool>& active) const;

  const int size_;
  const std::size_t group_size_;
  const std::size_t window_;
  std::deque<Members> history_;       // the last window_ groups
  std::vector<bool> waited_in_vain_;  // by rank
  Time hold_until_ = kNever;
  std::int64_t formed_ = 0;
  std::int64_t unconnected_ = 0;
};

}  // namespace horovod_partial
