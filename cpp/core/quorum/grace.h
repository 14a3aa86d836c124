// Learns how long a round stays open after its policy is satisfied, for ranks that are about to arrive.
#pragma once

#include <cstddef>
#include <vector>

#include "core/values/types.h"

namespace horovod_partial {

// Learns from recent arrivals whether grace pays. It pays if most ranks that were missing when the policy of a round
// was satisfied arrived within a cap of 5 % of the median step. If it pays, the grace is long enough for these ranks.
// Otherwise the grace is zero, because slow ranks are not worth a wait. (A fixed grace would be too short for some
// jobs, too long for others.)
class GraceEstimator {
 public:
  static constexpr double kShareOfStep = 0.05;
  static Time CapOf(Time step) {
    return Time(static_cast<Time::rep>(kShareOfStep * static_cast<double>(step.count())));
  }

  void RecordStep(Time step);  // `step`: the time between two closings of a bucket
  void RecordLag(Time lag);    // `lag`: how long after the policy of a round was satisfied a missing rank arrived
  Time Estimate() const { return estimate_; }

 private:
  // A ring buffer of the newest durations.
  class Window {
   public:
    void Push(Time value);
    bool empty() const { return values_.empty(); }
    Time Quantile(double q) const;
    const std::vector<Time>& values() const { return values_; }

   private:
    static constexpr std::size_t kCapacity = 64;
    std::vector<Time> values_;
    std::size_t next_ = 0;
  };
  void Update();

  Window steps_;
  Window lags_;
  Time estimate_{0};
};

}  // namespace horovod_partial
