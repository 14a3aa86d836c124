// Predicts how fast the ranks would go with another quorum, if their steps took as long as they did lately.
#pragma once

#include <cstddef>
#include <vector>

#include "core/quorum/policy.h"
#include "core/values/types.h"

namespace horovod_partial {

// The recent steps of the ranks that train. A step lasts from a rank's result to its next arrival.
struct StepSample {
  std::vector<Time> steps;         // steps of one rank after the other, oldest first
  std::vector<std::size_t> begin;  // where each rank's steps begin in `steps`, and the end; each rank has 1 or more
  Time span{0};                    // the largest sum of one rank's steps
  Time usual{0};                   // the median step
  Time reduction{0};               // time from a closing to its result

  std::size_t ranks() const { return begin.empty() ? 0 : begin.size() - 1; }
};

// The rules by which the coordinator closes a round (docs/protocol.md, rules 3, 4 and 6). With an automatic grace, each
// round has the grace that would be learned from rounds like it.
struct QuorumRule {
  int quorum = 1;
  Round max_staleness = 8;
  Time grace = Policy::kAutomaticGrace;
};

// Predicts the steps of all ranks per second; 0 if it cannot. The ranks repeat their steps for three spans. The first
// one does not count, because all ranks begin it together. At most kMostRounds rounds are simulated, each with all
// ranks.
double PredictRate(const StepSample& sample, const QuorumRule& rule);

}  // namespace horovod_partial
