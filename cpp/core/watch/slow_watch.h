// Rank 0 watches which ranks are slow, by the steps in their heartbeats.
#pragma once

#include <string>
#include <vector>

#include "core/slowness/slow_ranks.h"
#include "core/slowness/step_rows.h"
#include "core/values/types.h"
#include "core/watch/beat.h"

namespace horovod_partial {

class SlowWatch {
 public:
  explicit SlowWatch(int size) : rows_(size), slow_(size), signs_(static_cast<std::size_t>(size)) {}

  // Records what a rank has told.
  void Says(Rank rank, const Beat& beat);
  // Records that the process of a rank has ended, or cannot be heard any more.
  void Gone(Rank rank) { rows_.SetOut(rank, true); }
  // Returns what rank 0 must log now, in one line, or nothing. To be called now and then.
  std::string Pass();

 private:
  std::string Describe(const SlowRanks::News& news) const;

  StepRows rows_;
  SlowRanks slow_;
  std::vector<MachineSigns> signs_;  // of each rank: means over recent heartbeats
};

// Says in brackets how much processor time a rank uses, and what stands out in the other signs. Empty if nothing is
// known.
std::string Describe(const MachineSigns& signs);

}  // namespace horovod_partial
