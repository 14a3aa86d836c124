#include "core/groups/weights.h"

#include <cmath>

namespace horovod_partial {

std::vector<double> ContractionWeights(const std::vector<int>& steps, double contraction) {
  std::vector<double> weights;
  if (steps.empty()) return weights;
  const int most = *std::max_element(steps.begin(), steps.end());
  double sum = 0;
  for (const int taken : steps) {
    weights.push_back(std::exp(static_cast<double>(most - taken) * std::log(contraction)));
    sum += weights.back();
  }
  for (double& weight : weights) weight /= sum;
  return weights;
}

std::vector<double> StalenessWeights(const std::vector<int>& iterations, double alpha) {
  std::vector<double> weights(iterations.size());
  if (iterations.empty()) return weights;
  const int newest = *std::max_element(iterations.begin(), iterations.end());
  const int oldest = *std::min_element(iterations.begin(), iterations.end());
  const double indices = static_cast<double>(newest) - oldest + 1;
  const auto weight_of_index = [&](int lag) {
    if (alpha == 1) return 1 / indices;
    return std::pow(alpha, lag) * std::expm1(std::log(alpha)) / std::expm1(indices * std::log(alpha));
  };
  double left = 1;
  for (std::size_t i = 0; i < iterations.size(); ++i) {
    if (iterations[i] == newest) continue;
    const auto sharers = std::count(iterations.begin(), iterations.end(), iterations[i]);
    weights[i] = weight_of_index(newest - iterations[i]) / static_cast<double>(sharers);
    left -= weights[i];
  }
  const auto newest_ones = std::count(iterations.begin(), iterations.end(), newest);
  for (std::size_t i = 0; i < iterations.size(); ++i)
    if (iterations[i] == newest) weights[i] = left / static_cast<double>(newest_ones);
  return weights;
}

}  // namespace horovod_partial
