// Tells when to average models of ranks that train by themselves: the periods of WP-SGD (section 5.1), on one rank.
#pragma once

#include <algorithm>
#include <utility>

#include "core/values/types.h"

namespace horovod_partial {

// A period is over when the fastest rank has taken all its steps. The ranks tell each other by rounds of a bucket, the
// signal: the first rank to arrive closes a round. All ranks take part in round 0 of the signal, which is before the
// first period. Round n + 1 ends period n. `ended` is always how many rounds of the signal have ended on this rank.
class Periods {
 public:
  explicit Periods(int length) : length_(length) {}

  void TakeStep() { ++steps_; }
  // True if this rank must arrive at the signal after a step. Ask again when that round has ended: it may have ended an
  // earlier period, if another rank came first to that one's end.
  bool MustSignal(Round ended) const { return ended == 0 || (steps_ >= length_ && !IsOver(ended)); }
  // True if some rank has taken all the steps of this period, so that it is time to average.
  bool IsOver(Round ended) const { return ended >= periods_ + 2; }
  // Begins the next period. Returns how many steps this rank has taken in the last one.
  int BeginNext() {
    ++periods_;
    return std::exchange(steps_, 0);
  }
  // Begins a new period after an average of all ranks that no rank has signalled. Then all ranks have the same `ended`.
  void BeginAnew(Round ended) {
    periods_ = std::max<Round>(ended - 1, 0);
    steps_ = 0;
  }
  // All steps of this rank. Each period that is over counts with its whole length, so that ranks can be compared even
  // if the period is over for some of them only.
  int Work() const { return static_cast<int>(periods_) * length_ + steps_; }

 private:
  int length_;
  Round periods_ = 0;  // periods that are over
  int steps_ = 0;      // steps of this rank in the present period
};

}  // namespace horovod_partial
