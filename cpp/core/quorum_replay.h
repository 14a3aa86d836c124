// How fast would the ranks go with another quorum, if their steps took as long as they did lately?
#pragma once

#include <cstddef>
#include <vector>

#include "core/policy.h"
#include "core/types.h"

namespace horovod_partial {

// What the ranks that train did lately. A step is from the result that a rank took to its next arrival.
struct StepSample {
  std::vector<Time> steps;         // of one rank after the other, oldest first
  std::vector<std::size_t> begin;  // of each rank's in `steps`, and the end; each has 1 or more
  Time span{0};                    // how long the rank that was busiest took for its steps
  Time usual{0};                   // the median step
  Time reduction{0};               // from a closing to its result

  std::size_t ranks() const { return begin.empty() ? 0 : begin.size() - 1; }
};

// A round as the coordinator closes it (docs/protocol.md, rules 3, 4 and 6). Where the grace is learned, each round has
// the one that would be learned of rounds like it.
struct QuorumRule {
  int quorum = 1;
  Round max_staleness = 8;
  Time grace = Policy::kAutomaticGrace;
};

// Steps of all ranks in a second, predicted: the ranks take their steps again and again, for three spans, of which the
// first does not count, since all ranks begin it together. 0 if nothing can be said. The work is bounded by kMostRounds
// rounds, each of which looks at every rank.
double PredictRate(const StepSample& sample, const QuorumRule& rule);

}  // namespace horovod_partial
