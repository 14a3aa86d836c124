// Rank 0 watches which ranks are slow, by the steps in their heartbeats.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/slowness/slow_rank.h"
#include "core/slowness/slow_ranks.h"
#include "core/slowness/step_timer.h"
#include "core/values/types.h"
#include "core/watch/activity.h"

namespace horovod_partial {

// What is known of a rank, since the watch began.
struct WatchedRank {
  std::int64_t steps = 0;
  double compute_seconds = 0;        // of these steps together
  std::int64_t bytes = 0;            // handed over for reduction
  MachineSigns signs;                // means over recent heartbeats
  std::optional<Slowness> slowness;  // while the rank is slow
};

class SlowWatch {
 public:
  explicit SlowWatch(int size) : rows_(size), slow_(size), ranks_(static_cast<std::size_t>(size)) {}

  // Records what a rank has told.
  void Says(Rank rank, const Beat& beat);
  // Records that the process of a rank has ended, or cannot be heard any more.
  void Gone(Rank rank) { rows_.SetOut(rank, true); }
  // Returns what rank 0 must log now, in one line, or nothing. To be called now and then.
  std::string Pass();
  // Returns what is known of each rank; nothing as long as no rank has told of steps.
  std::vector<WatchedRank> ranks() const;

 private:
  std::string Describe(const SlowRanks::News& news) const;

  StepRows rows_;
  SlowRanks slow_;
  std::vector<WatchedRank> ranks_;  // without their slowness, which slow_ knows
};

// Says in brackets how much processor time a rank uses, and what stands out in the other signs. Empty if nothing is
// known.
std::string Describe(const MachineSigns& signs);

}  // namespace horovod_partial
