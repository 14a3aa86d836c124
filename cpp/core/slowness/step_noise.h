// Estimates how much the ranks' steps differ by chance.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace horovod_partial {

// The typical change of a value from one step to the next. A rank that is slow for long changes little, so it does not
// count as noise. A value is NaN for a rank that did not take part in the step.
class StepNoise {
 public:
  static constexpr std::size_t kSteps = 64;

  void Add(const std::vector<double>& values);
  // The number of steps from which the noise is estimated.
  std::size_t steps() const { return count_ < kSteps ? count_ : kSteps; }
  // The standard deviation of a value. Typical: if the values are normal but for outliers. Full: with the outliers.
  double typical() const;
  double full() const;

 private:
  double Quantile(std::array<double, kSteps> of_steps, double quantile) const;

  std::vector<double> last_;
  // For each of the last steps the median change of a value, and the mean of the squares of the changes: ring buffers.
  std::array<double, kSteps> medians_{}, squares_{};
  std::size_t count_ = 0;  // of all steps
};

}  // namespace horovod_partial
