// Predicts how fast the ranks would be with another quorum, if their steps took as long as lately.
#pragma once

#include <cstddef>
#include <vector>

#include "core/quorum/policy.h"
#include "core/values/types.h"

namespace horovod_partial {

// The recent steps of the ranks that train. A step lasts from a result of the rank to its next arrival.
struct StepSample {
  std::vector<Time> steps;  // the length of each step: all steps of a rank, oldest first, then those of the next rank
  // The index in `steps` of each rank's first step, then the number of all steps. Each rank has at least one step.
  std::vector<std::size_t> begin;
  Time span{0};       // the largest total length of the steps of one rank
  Time usual{0};      // the median length of a step
  Time reduction{0};  // the time from when a round closes to its result

  std::size_t ranks() const { return begin.empty() ? 0 : begin.size() - 1; }
};

// The rules by which a simulated round closes, as in the coordinator (docs/protocol.md, rules 3, 4 and 6). If the grace
// is automatic, a round has the grace that the coordinator would learn from rounds like it.
struct QuorumRule {
  int quorum = 1;
  Round max_staleness = 8;
  Time grace = Policy::kAutomaticGrace;
};

// Predicts the steps of all ranks per second, or 0 if it cannot predict. The simulated ranks repeat their steps for
// three times `sample.span`. The first third of that time does not count, because all ranks begin at once. At most
// kMostRounds rounds are simulated.
double PredictRate(const StepSample& sample, const QuorumRule& rule);

}  // namespace horovod_partial
