// How much each model counts in an average. It follows from numbers that every rank has, so all ranks compute the same.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace horovod_partial {

enum class Weights : std::uint8_t {
  kUniform,
  kContraction,  // by how many steps a rank is behind the fastest one: ContractionWeights
  kStaleness,    // by how old a model is: StalenessWeights
};
constexpr auto NamesOf(Weights /*type*/) { return std::array{"uniform", "contraction", "staleness"}; }

// WP-SGD (equation 6): q_i = r^T_i / sum_j r^T_j, where T_i is how many steps fewer rank i has taken than the fastest
// one. Computed in logarithms; `contraction`, the paper's r, is above 0 and at most 1, where 1 gives equal weights.
std::vector<double> ContractionWeights(const std::vector<int>& steps, double contraction);

// P-Reduce's dynamic weights: an exponential moving average over relative iterations. With i = iteration - oldest + 1
// and k the newest's i: beta_i = (1 - alpha) alpha^(k - i) / (1 - alpha^k). Models of equal iteration share their
// index's weight; the weight of indices that no model has goes to the newest, as in the authors' demonstration. (A
// third-party implementation gives it to the oldest, and inverts the purpose.) `alpha` is above 0 and at most 1.
std::vector<double> StalenessWeights(const std::vector<int>& iterations, double alpha);

}  // namespace horovod_partial
