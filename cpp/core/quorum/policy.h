// Policies say when a round may close, and what is reduced. A grace lets a round that may close wait a little longer.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <tuple>

#include "core/groups/schedule.h"
#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// The policy of a bucket. All ranks must share it. Solo is a quorum of 1. Majority is a quorum of half the ranks,
// or a random initiator (eager-SGD, PPoPP'20, section 4). GroupAverage is a quorum of 1 with a schedule (WAGMA-SGD).
// PartialReduce forms groups of ready ranks (P-Reduce).
struct Policy {
  enum class Rule : std::uint8_t {
    kQuorum,       // a round closes when at least `quorum` ranks have arrived
    kInitiator,    // a round closes when one rank has arrived, drawn at random for this round
    kReady,        // groups of `group_size` ranks form, first come, first served; other ranks are not in the round
    kWorkSharing,  // a round closes when all `micro_batches` of the update are in the sum, whichever ranks made them
  };
  static constexpr Time kAutomaticGrace{-1};

  Rule rule = Rule::kQuorum;
  int quorum = 1;                // kQuorum: the quorum, 1 or more
  std::uint64_t seed = 0;        // kInitiator: the seed for drawing a rank at random for each round
  Round max_staleness = 8;       // the number of rounds that a rank may miss in a row; 0 or more
  Time grace = kAutomaticGrace;  // how long a round stays open after its policy is satisfied, for other ranks
  Schedule schedule;             // GroupAverage: which ranks average their models together
  Round period = 0;              // GroupAverage: in every `period`-th round all ranks are one group; 0 for never
  int group_size = 0;            // PartialReduce: the number of ranks in a group, 1 or more
  int window = 0;                // PartialReduce: so many consecutive groups shall connect all ranks (see ReadyGroups)
  int micro_batches = 0;  // WorkSharing: the number of micro-batches in an update, a multiple of the number of ranks
  // WorkSharing: true for the bucket in which ranks report their micro-batches, and learn which they may begin.
  bool grants = false;
  std::string description;  // the user's words for the policy; all ranks must have the same words, and errors show them

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("rule", self.rule), Named("quorum", self.quorum), Named("seed", self.seed),
                           Named("max_staleness", self.max_staleness), Named("grace_seconds", self.grace),
                           Named("schedule", self.schedule), Named("period", self.period),
                           Named("group_size", self.group_size), Named("window", self.window),
                           Named("micro_batches", self.micro_batches), Named("grants", self.grants),
                           Named("description", self.description));
  }

  // Returns true if a round may have several groups, or may leave ranks out.
  bool grouped() const { return rule == Rule::kReady || schedule.kind != Schedule::Kind::kNone; }
};

constexpr auto NamesOf(Policy::Rule /*type*/) { return std::array{"quorum", "initiator", "ready", "work_sharing"}; }

// Throws std::runtime_error if a policy for `size` ranks cannot have these values.
void Check(const Policy& policy, int size);

// Returns true if this round reduces all ranks together, and does not close before every rank has arrived.
bool IsFullRound(const Policy& policy, Round round);

// Returns the rank that is drawn for a round, to close it by its arrival. Draws are uniform, and equal on every rank.
Rank Initiator(const Policy& policy, Round round, int size);

// Learns from recent arrivals whether grace pays. Grace pays if most ranks that were missing when the policy of a round
// was satisfied arrived within a cap: 5 % of the median time of a step. Then the grace is long enough for these ranks.
// Otherwise the grace is zero, because slow ranks are not worth a wait. (A fixed grace would be too short for some
// jobs, too long for others.)
class GraceEstimator {
 public:
  // `step`: the time from one closed round of a bucket to the next.
  void RecordStep(Time step) { Record(steps_, step); }
  // `lag`: how long after the policy of a round was satisfied a missing rank arrived.
  void RecordLag(Time lag) { Record(lags_, lag); }
  Time Estimate() const { return estimate_; }

 private:
  void Record(std::deque<Time>& window, Time newest);

  std::deque<Time> steps_;  // the newest steps
  std::deque<Time> lags_;   // the newest lags
  Time estimate_{0};
};

}  // namespace horovod_partial
