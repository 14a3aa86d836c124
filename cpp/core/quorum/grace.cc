#include "core/quorum/grace.h"

#include <algorithm>

namespace horovod_partial {

void GraceEstimator::Window::Push(Time value) {
  if (values_.size() < kCapacity) {
    values_.push_back(value);
  } else {
    values_[next_] = value;
  }
  next_ = (next_ + 1) % kCapacity;
}

Time GraceEstimator::Window::Quantile(double q) const {
  std::vector<Time> sorted = values_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(q * static_cast<double>(sorted.size() - 1));
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

void GraceEstimator::RecordStep(Time step) {
  steps_.Push(step);
  Update();
}

void GraceEstimator::RecordLag(Time lag) {
  lags_.Push(lag);
  Update();
}

void GraceEstimator::Update() {
  if (steps_.empty() || lags_.empty()) return;
  const Time cap = CapOf(steps_.Quantile(0.5));
  std::size_t within = 0;
  Time longest{0};
  for (const Time lag : lags_.values()) {
    if (lag > cap) continue;
    ++within;
    longest = std::max(longest, lag);
  }
  estimate_ = 2 * within > lags_.values().size() ? longest : Time{0};
}

}  // namespace horovod_partial
