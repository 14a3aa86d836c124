#include "core/slowness/step_noise.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/values/median.h"

namespace horovod_partial {
namespace {

// The median absolute difference of two values from one normal distribution, in standard deviations of it.
constexpr double kMedianDifference = 0.954;
// In the other steps some rank may become slow or fast, which is no noise.
constexpr double kMostSteps = 0.75;

}  // namespace

void StepNoise::Add(const std::vector<double>& values) {
  std::vector<double> changes;
  for (std::size_t rank = 0; rank < std::min(last_.size(), values.size()); ++rank) {
    const double change = std::abs(values[rank] - last_[rank]);
    if (!std::isnan(change)) changes.push_back(change);
  }
  last_ = values;
  if (changes.empty()) return;
  medians_[count_ % kSteps] = Median(changes);
  squares_[count_ % kSteps] =
      std::inner_product(changes.begin(), changes.end(), changes.begin(), 0.0) / static_cast<double>(changes.size());
  ++count_;
}

double StepNoise::Quantile(std::array<double, kSteps> of_steps, double quantile) const {
  if (count_ == 0) return 0;
  const auto count = static_cast<std::ptrdiff_t>(steps());
  const auto at = of_steps.begin() + static_cast<std::ptrdiff_t>(quantile * static_cast<double>(count));
  std::nth_element(of_steps.begin(), at, of_steps.begin() + count);
  return *at;
}

double StepNoise::typical() const { return Quantile(medians_, 0.5) / kMedianDifference; }

double StepNoise::full() const { return std::sqrt(Quantile(squares_, kMostSteps) / 2); }

}  // namespace horovod_partial
