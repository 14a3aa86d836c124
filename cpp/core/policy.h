// Sync policies: when may a round close?
#pragma once

#include <cstdint>
#include <string>

#include "core/types.h"

namespace horovod_partial {

// What all ranks must agree on for a bucket. Solo is a quorum of 1, Majority a quorum of half the ranks or a random
// initiator (eager-SGD, PPoPP'20, section 3).
struct Policy {
  enum class Rule : std::uint8_t {
    kQuorum,     // at least `quorum` ranks have arrived
    kInitiator,  // the rank that is drawn for this round has arrived
  };
  static constexpr Time kAutomaticGrace{-1};

  Rule rule = Rule::kQuorum;
  int quorum = 1;                // kQuorum: ranks, 1 or more
  std::uint64_t seed = 0;        // kInitiator: of the draws
  Round max_staleness = 16;      // rounds that a rank may miss in a row; 0 or more
  Time grace = kAutomaticGrace;  // how long a satisfied round stays open for ranks that are about to arrive
  std::string description;       // the user's words for all this; compared between the ranks and shown in errors
};

// The rank drawn for `round`: uniform, and the same wherever it is computed.
Rank Initiator(const Policy& policy, Round round, int size);

}  // namespace horovod_partial
