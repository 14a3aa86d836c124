// Policies without grace, as several tests have them.
#pragma once

#include <cstdint>
#include <string>

#include "core/quorum/policy.h"

namespace horovod_partial::test {

inline Policy Quorum(int quorum, Round max_staleness = 16) {
  Policy policy;
  policy.quorum = quorum;
  policy.max_staleness = max_staleness;
  policy.grace = Time(0);
  policy.description = "Quorum(" + std::to_string(quorum) + ")";
  return policy;
}

inline Policy RandomInitiator(std::uint64_t seed) {
  Policy policy = Quorum(1);
  policy.rule = Policy::Rule::kInitiator;
  policy.seed = seed;
  policy.description = "Majority(initiator='random')";
  return policy;
}

// Models in pairs along a butterfly.
inline Policy Pairs(Round period = 0, int quorum = 1, Round max_staleness = 16) {
  Policy policy = Quorum(quorum, max_staleness);
  policy.schedule.kind = Schedule::Kind::kButterfly;
  policy.schedule.group_size = 2;
  policy.period = period;
  policy.description = "GroupAverage(2)";
  return policy;
}

// Models of the first ranks that are ready.
inline Policy Ready(int group_size, int window = 8) {
  Policy policy = Quorum(1);
  policy.rule = Policy::Rule::kReady;
  policy.group_size = group_size;
  policy.window = window;
  policy.description = "PartialReduce(" + std::to_string(group_size) + ")";
  return policy;
}

}  // namespace horovod_partial::test
