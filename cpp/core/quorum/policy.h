// Sync policies: when may a round close?
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>

#include "core/groups/schedule.h"
#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// What all ranks must agree on for a bucket. Solo is a quorum of 1, Majority a quorum of half the ranks or a random
// initiator (eager-SGD, PPoPP'20, section 4). Group averages are solo with a schedule (WAGMA-SGD); partial reduce is
// kReady (P-Reduce).
struct Policy {
  enum class Rule : std::uint8_t {
    kQuorum,       // at least `quorum` ranks have arrived
    kInitiator,    // the rank that is drawn for this round has arrived
    kReady,        // groups of `group_size` ranks form, first come, first served; the others are not in the round
    kAuto,         // as many ranks have arrived as pays off at present, but at least `quorum`
    kWorkSharing,  // all `micro_batches` of the update are in the sum, from any ranks
  };
  static constexpr Time kAutomaticGrace{-1};

  Rule rule = Rule::kQuorum;
  int quorum = 1;                // kQuorum, kAuto: ranks, 1 or more
  std::uint64_t seed = 0;        // kInitiator: seed of the draws
  Round max_staleness = 8;       // rounds that a rank may miss in a row; 0 or more
  Time grace = kAutomaticGrace;  // how long a satisfied round stays open for ranks that are about to arrive
  Schedule schedule;             // kQuorum, kInitiator: which ranks reduce together; they contribute models
  Round period = 0;              // with a schedule: one of this many rounds is of all ranks together; 0: none is
  int group_size = 0;            // kReady: ranks, 1 or more
  int window = 0;                // kReady: this many groups in a row shall connect all ranks
  int micro_batches = 0;  // kWorkSharing: micro-batches of an update on all ranks together, equally many for each rank
  bool grants =
      // kWorkSharing: this bucket keeps the grants: ranks report in it what they began, and get what they may begin
      false;
  std::string description;  // the user's words for all this; compared between the ranks and shown in errors

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("rule", self.rule), Named("quorum", self.quorum), Named("seed", self.seed),
                           Named("max_staleness", self.max_staleness), Named("grace_seconds", self.grace),
                           Named("schedule", self.schedule), Named("period", self.period),
                           Named("group_size", self.group_size), Named("window", self.window),
                           Named("micro_batches", self.micro_batches), Named("grants", self.grants),
                           Named("description", self.description));
  }
  bool operator==(const Policy& other) const { return Fields(*this) == Fields(other); }

  // True if a round may have several groups, or leave ranks out.
  bool grouped() const { return rule == Rule::kReady || schedule.kind != Schedule::Kind::kNone; }
};

constexpr auto NamesOf(Policy::Rule /*type*/) {
  return std::array{"quorum", "initiator", "ready", "auto", "work_sharing"};
}

// Throws std::runtime_error if no policy for `size` ranks can have these values.
void Check(const Policy& policy, int size);

// True for a round of all ranks together, which does not close before every one has arrived.
bool IsFullRound(const Policy& policy, Round round);

// The rank that is drawn for `round`. Draws are uniform, and the same on every rank.
Rank Initiator(const Policy& policy, Round round, int size);

}  // namespace horovod_partial
