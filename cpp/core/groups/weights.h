// Computes how much each model counts in an average. All ranks compute the same, from numbers that they all know.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

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

// The dynamic weights of P-Reduce: an exponential moving average over relative iterations. With i = iteration - oldest
// + 1 and k the i of the newest model: beta_i = (1 - alpha) alpha^(k - i) / (1 - alpha^k). Models of equal iteration
// share the weight of their index. The weight of an index without a model goes to the newest model, as in the authors'
// demonstration. (An implementation by others gives it to the oldest, which defeats the purpose.) 0 < `alpha` <= 1.
std::vector<double> StalenessWeights(const std::vector<int>& iterations, double alpha);

}  // namespace horovod_partial
