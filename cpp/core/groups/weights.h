// Averages of models: when a rank must take part (WP-SGD), and how much each model counts. All ranks get equal results.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/values/types.h"

namespace horovod_partial {

enum class Weights : std::uint8_t {
  kUniform,
  kContraction,  // the more steps a rank is behind the fastest, the less its model counts: see ContractionWeights
  kStaleness,    // the older a model is, the less it counts: see StalenessWeights
};
constexpr auto NamesOf(Weights /*type*/) { return std::array{"uniform", "contraction", "staleness"}; }

// The weights of WP-SGD (equation 6): q_i = r^T_i / sum_j r^T_j. T_i is the number of steps that rank i is behind the
// fastest rank. `contraction`, the r of the paper, is above 0 and at most 1; 1 gives equal weights. Logarithms are used
// so that no power underflows.
std::vector<double> ContractionWeights(const std::vector<int>& steps, double contraction);

// The dynamic weights of P-Reduce: an exponential moving average over relative iterations. A model has index i =
// iteration - oldest + 1, the newest model has index k: beta_i = (1 - alpha) alpha^(k - i) / (1 - alpha^k). Models of
// equal iteration share the weight of their index. The weight of an index without a model goes to the newest model, as
// in the authors' demonstration. (An implementation by others gives this weight to the oldest model, which defeats the
// purpose.) 0 < `alpha` <= 1.
std::vector<double> StalenessWeights(const std::vector<int>& iterations, double alpha);

// A period (the steps between two averages of models over all ranks) is over when the fastest rank has taken `length`
// steps. That rank then arrives at a small bucket, to tell the others. The bucket has no other use, and its rounds
// close when the first rank arrives. Round 0 of this bucket waits for all ranks, before the first period. Round n + 1
// ends period n. In all functions `ended` is the number of rounds of this bucket that have ended on this rank.
class Periods {
 public:
  explicit Periods(int length) : length_(length) {}

  void TakeStep() { ++steps_; }
  // Returns true if this rank must arrive at the bucket with which ranks end periods. When the round of this arrival
  // has ended, the caller must ask again: the round may have ended an earlier period, which another rank had completed.
  bool MustSignal(Round ended) const { return ended == 0 || (steps_ >= length_ && !IsOver(ended)); }
  // Returns true if some rank has taken all its steps of the present period, so the models must be averaged now.
  bool IsOver(Round ended) const { return ended >= periods_ + 2; }
  // Begins the next period. Returns the number of steps that this rank has taken in the last period.
  int BeginNext() {
    ++periods_;
    return std::exchange(steps_, 0);
  }
  // Begins a new period within a flush, because a flush averages the models of all ranks, too. `ended`, which must be
  // equal on all ranks, is the number of ended rounds of the bucket with which ranks end periods.
  void BeginAnew(Round ended) {
    periods_ = std::max<Round>(ended - 1, 0);
    steps_ = 0;
  }
  // Returns the number of all steps of this rank. A period (the steps between two averages over all ranks) that is over
  // counts as `length_` steps, even if this rank took fewer. So ranks are comparable before all know this end.
  int Work() const { return static_cast<int>(periods_) * length_ + steps_; }

 private:
  int length_;
  Round periods_ = 0;  // the number of periods that are over
  int steps_ = 0;      // the number of steps of this rank in the present period
};

}  // namespace horovod_partial
