// What a coordinator saw and decided, recorded so that it can be replayed and explained.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "core/message.h"
#include "core/types.h"

namespace horovod_partial {

// Writes one line for each event; a replay feeds them to a new coordinator, which must decide the same again, because
// decisions are functions of what was seen and of the time that was passed in. Not thread-safe.
class DecisionLog {
 public:
  // Writes to `out`, which must outlive this, what a coordinator of `size` ranks with this SetDeadlockAfter decides.
  DecisionLog(std::ostream& out, int size, Time deadlock_after);

  void Observe(Rank rank, const Report& report, Time now);
  void SetJoined(const std::vector<bool>& joined);
  void Decide(Time now, const std::vector<Closing>& closings);
  void Forget(const std::string& bucket);

 private:
  std::ostream& out_;
  std::vector<bool> joined_;
};

struct Replay {
  int decisions = 0;       // how many calls of Decide closed a round
  int rounds = 0;          // how many rounds they closed
  std::string difference;  // the first decision that came out otherwise, in words; empty if all are the same
};

// Throws std::runtime_error if `in` is no decision log.
Replay ReplayDecisions(std::istream& in);

}  // namespace horovod_partial
