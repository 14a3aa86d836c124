// When do ranks average that train by themselves? The periods of WP-SGD (section 5.1), counted on one rank.
#pragma once

#include <algorithm>
#include <utility>

#include "core/types.h"

namespace horovod_partial {

// A period is over when the fastest rank has taken all its steps. The ranks tell each other by rounds of a bucket, the
// signal, which the first rank to arrive closes. Round 0 of the signal, in which all ranks take part, is before the
// first period; the end of period n is round n + 1. `ended` is always the number of rounds of the signal that have
// ended on this rank.
class Periods {
 public:
  explicit Periods(int length) : length_(length) {}

  void TakeStep() { ++steps_; }
  // Whether to arrive at the signal after a step; to be asked again when that has ended, since a round may only have
  // told of an earlier period, to whose end another rank came first.
  bool MustSignal(Round ended) const { return ended == 0 || (steps_ >= length_ && !IsOver(ended)); }
  // Whether some rank has taken all the steps of this period, so that it is time to average.
  bool IsOver(Round ended) const { return ended >= periods_ + 2; }
  // Begins the next period. Returns the steps that this rank has taken in the one that is over.
  int BeginNext() {
    ++periods_;
    return std::exchange(steps_, 0);
  }
  // Begins a new period after an average of all ranks that nobody has signalled. All ranks have the same `ended` then.
  void BeginAnew(Round ended) {
    periods_ = std::max<Round>(ended - 1, 0);
    steps_ = 0;
  }
  // All steps of this rank, where each period that is over counts with its whole length: comparable over the ranks
  // also while a period is over for some of them only.
  int Work() const { return static_cast<int>(periods_) * length_ + steps_; }

 private:
  int length_;
  Round periods_ = 0;  // that are over
  int steps_ = 0;      // of this rank in the present one
};

}  // namespace horovod_partial
