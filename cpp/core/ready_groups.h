// Groups of the ranks that are ready first, and no cliques among them.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "core/groups.h"
#include "core/types.h"

namespace horovod_partial {

// P-Reduce's controller: first come, first served. Ranks of equal speed would find the same partners for ever, and
// parts of the job would never exchange anything; so the last `window` groups shall connect all active ranks
// (P-Reduce's "update isolation"; the paper's own rule is not published, this one is ours). While they do not, ranks
// that the window does not connect are grouped in preference; and if all candidates are connected already, they are
// held until a rank of another part comes, for as long as their last step took at most. A part that has waited in vain
// is not held again before the window has been connected once.
class ReadyGroups {
 public:
  struct Candidate {
    Rank rank;
    Time hold_until;  // it waits no longer than that for a rank of another part
  };

  ReadyGroups(int size, int group_size, int window);

  // The groups that form now, of candidates in the order in which they came. Active ranks take part in training.
  std::vector<Members> Form(std::vector<Candidate> candidates, const std::vector<bool>& active, Time now);
  // A group that something else has made: it counts like the others.
  void Add(const Members& group, const std::vector<bool>& active);

  // When Form should be called again although nobody has come: the end of a hold, or kNever.
  Time hold_until() const { return hold_until_; }
  std::int64_t formed() const { return formed_; }
  // How often the last `window` groups did not connect all active ranks.
  std::int64_t unconnected() const { return unconnected_; }

 private:
  // By rank: a name for the part that it is in of the graph of the last groups, so many at most.
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
