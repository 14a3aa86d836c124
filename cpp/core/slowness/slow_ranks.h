// Finds out which ranks are slow, from the compute times of all ranks in each step, and how much steps differ by
// chance.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/slowness/slow_rank.h"
#include "core/values/types.h"

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

// Ranks are compared within a step, so what makes a step long for all of them accuses nobody. A rank is slow only if
// its steps are longer than those of the other ranks, or have long ones more often, than chance has it. The other ranks
// show what chance is. So if samples differ in length and each rank has long ones, no rank is slow. The result depends
// on nothing but the compute times.
class SlowRanks {
 public:
  explicit SlowRanks(int size);

  // A rank becomes slow, is slow in another way, or is not slow any more.
  struct News {
    SlowRank::Change change = SlowRank::Change::kNone;
    Slowness slowness;
  };
  // `seconds`: how long each rank computed in this step; NaN or infinity for a rank that did not take part. Returns
  // what must be told. Throws std::invalid_argument unless there is a number for each rank.
  std::vector<News> Step(const std::vector<double>& seconds);

  // All times when a rank was slow, oldest first.
  // Throws std::out_of_range if there is no such rank.
  const std::vector<Slowness>& found(Rank rank) const { return members_.at(Index(rank)).slow.found(); }

 private:
  struct JudgedRank {
    SlowRank slow;
    bool was_slow = false;  // in the last step
    double begins = 0;      // how often slow steps began lately
    double others = 0;      // the number of steps that followed one that was not slow
  };
  // The compute times of one step.
  struct Row {
    std::int64_t step;
    std::vector<double> seconds;
    std::vector<double> usual;   // for each rank, the median of the other ranks
    std::vector<double> ratios;  // the logarithm of a rank's time over that; NaN for a rank that did not take part
    double median;               // of all ranks
  };
  std::vector<double> Levels(const Row& row) const;
  void Compare(const Row& row, std::vector<News>& news);

  std::vector<JudgedRank> members_;
  StepNoise noise_;         // of the ratios
  StepNoise level_noise_;   // of what Levels returns
  std::vector<Row> first_;  // the first steps, until the noise is known
  std::int64_t steps_ = 0;  // the number of steps that were compared: those of two ranks or more
  double usual_ = 0;        // the median rank's time: a mean over recent steps
};

}  // namespace horovod_partial
