// Rank 0 looks for slow ranks, in the steps that all ranks report with their heartbeats.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/slowness/slow_parts.h"
#include "core/slowness/slow_rank.h"
#include "core/slowness/slow_ranks.h"
#include "core/slowness/step_timer.h"
#include "core/values/types.h"
#include "core/watch/activity.h"

namespace horovod_partial {

// What rank 0 knows of a rank since the watch began.
struct WatchedRank {
  std::int64_t steps = 0;
  double compute_seconds = 0;        // the compute time of these steps together
  double step_seconds = 0;           // the whole time of these steps, with waits and reductions
  Parts parts;                       // the parts of this time, over the steps where they are known
  std::int64_t bytes = 0;            // the bytes that the rank has handed over for reduction
  MachineSigns signs;                // means over recent heartbeats
  std::optional<Slowness> slowness;  // set while the rank is slow
  std::string part = "none";         // the part that explains the slowness, while the rank is slow
};

class SlowWatch {
 public:
  explicit SlowWatch(int size) : rows_(size), slow_(size), parts_(size), ranks_(static_cast<std::size_t>(size)) {}

  // Records a heartbeat of a rank.
  void Says(Rank rank, const Beat& beat);
  // Records that the process of a rank has ended, or cannot be heard any more.
  void Gone(Rank rank) { rows_.SetOut(rank, true); }
  // Judges the new steps. Returns the line that rank 0 must log now, or an empty text. Must be called regularly.
  std::string Pass();
  // Returns what rank 0 knows of each rank. The result is empty until some rank has reported a step or bytes.
  std::vector<WatchedRank> ranks() const;

 private:
  std::string Describe(const SlowRanks::News& news) const;

  StepRows rows_;
  SlowRanks slow_;
  SlowParts parts_;
  std::vector<WatchedRank> ranks_;  // `slowness` and `part` are not set here, but by ranks()
};

// Returns how many processors a rank uses, and which other signs are high, in brackets; or an empty text.
std::string Describe(const MachineSigns& signs);

}  // namespace horovod_partial
