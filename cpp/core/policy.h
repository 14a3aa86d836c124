// Sync policies: when may a round close?
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>

#include "core/fields.h"
#include "core/schedule.h"
#include "core/types.h"

namespace horovod_partial {

// What all ranks must agree on for a bucket. Solo is a quorum of 1, Majority a quorum of half the ranks or a random
// initiator (eager-SGD, PPoPP'20, section 4). Group averages are solo with a schedule (WAGMA-SGD); partial reduce is
// kReady (P-Reduce).
struct Policy {
  enum class Rule : std::uint8_t {
    kQuorum,       // at least `quorum` ranks have arrived
    kInitiator,    // the rank that is drawn for this round has arrived
    kReady,        // groups of `group_size` ranks form, first come, first served; the others are not in the round
    kAuto,         // as many ranks have arrived as pays off at present, and at least `quorum`
    kWorkSharing,  // all `micro_batches` of the update are in the sum, whoever's they are
  };
  static constexpr Time kAutomaticGrace{-1};

  Rule rule = Rule::kQuorum;
  int quorum = 1;                // kQuorum, kAuto: ranks, 1 or more
  std::uint64_t seed = 0;        // kInitiator: of the draws
  Round max_staleness = 8;       // rounds that a rank may miss in a row; 0 or more
  Time grace = kAutomaticGrace;  // how long a satisfied round stays open for ranks that are about to arrive
  Schedule schedule;             // kQuorum, kInitiator: which ranks reduce together; they contribute models
  Round period = 0;              // with a schedule: every so many rounds one is of all ranks together; 0: none is
  int group_size = 0;            // kReady: ranks, 1 or more
  int window = 0;                // kReady: so many groups shall connect all ranks
  int micro_batches = 0;         // kWorkSharing: of an update, on all ranks together; so many for each rank
  bool grants =
      false;  // kWorkSharing: with this bucket the ranks tell what they have begun, and are told what they may
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

  // A round may have several groups, or leave ranks out.
  bool grouped() const { return rule == Rule::kReady || schedule.kind != Schedule::Kind::kNone; }
};

constexpr auto NamesOf(Policy::Rule /*type*/) {
  return std::array{"quorum", "initiator", "ready", "auto", "work_sharing"};
}

// Throws std::runtime_error if no policy among `size` ranks can have these values.
void Check(const Policy& policy, int size);

// A round for all ranks together, which does not close before every one has arrived.
bool IsFullRound(const Policy& policy, Round round);

// The rank drawn for `round`: uniform, and the same wherever it is computed.
Rank Initiator(const Policy& policy, Round round, int size);

}  // namespace horovod_partial
