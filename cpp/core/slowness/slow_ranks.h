// Finds the slow ranks from the compute times of all ranks in each step. Estimates how much these times vary by chance.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/slowness/rare_pauses.h"
#include "core/slowness/slow_rank.h"
#include "core/values/types.h"

namespace horovod_partial {

// Estimates from changes between steps how much a value of a rank varies by chance. A rank that is slow for long adds
// no noise: its value is high, but changes little. A value is NaN for a rank that did not take part in the step.
class StepNoise {
 public:
  static constexpr std::size_t kSteps = 64;

  void Add(const std::vector<double>& values);
  // The number of steps from which the noise is estimated.
  std::size_t steps() const { return count_ < kSteps ? count_ : kSteps; }
  // The estimated standard deviation of a value. typical() ignores outliers, full() includes them.
  double typical() const;
  double full() const;

 private:
  double Quantile(std::array<double, kSteps> of_steps, double quantile) const;

  std::vector<double> last_;
  // Ring buffers, for the last steps: the median change of a value in the step, and the mean of the squared changes.
  std::array<double, kSteps> medians_{}, squares_{};
  std::size_t count_ = 0;  // the number of steps that were added, including those no longer in the ring buffers
};

// Compares ranks within a step, so a step that is long for all ranks accuses nobody. A rank is slow only if its steps
// are longer than those of the other ranks, or if its steps are long more often. The difference must be larger than
// chance explains, and chance is judged by the other ranks. So if samples differ in length and each rank has long ones,
// no rank is slow. The result depends on nothing but the compute times.
class SlowRanks {
 public:
  explicit SlowRanks(int size);

  // A change to report: a rank becomes slow, is slow in another way, or is not slow any more.
  struct News {
    SlowRank::Change change = SlowRank::Change::kNone;
    Slowness slowness;
  };
  // `seconds`: how long each rank computed in this step; NaN or infinity for a rank that did not take part. Returns the
  // changes to report. Throws std::invalid_argument unless `seconds` has a number for each rank.
  std::vector<News> Step(const std::vector<double>& seconds);

  // Returns the spans in which a rank was slow or paused, oldest first, at most 1,000 of each. One span at most has the
  // end -1, and it comes last. Throws std::out_of_range if there is no such rank.
  std::vector<Slowness> found(Rank rank) const;
  // Returns the last item of found(rank) if the rank is slow now. Copies no others, because metrics ask often.
  std::optional<Slowness> present(Rank rank) const;

 private:
  // Which finding about a rank is shown. If the rank is slow and pauses as well, the other finding is hidden.
  enum class Shown : std::uint8_t { kNothing, kSlow, kPauses };
  struct JudgedRank {
    SlowRank slow;
    bool was_slow = false;  // true if the rank's last step was slow
    double begins = 0;      // how many runs of slow steps began; an old step counts less than a new one
    double others = 0;      // how many steps followed a step that was not slow, with the same weights
    Shown shown = Shown::kNothing;
    std::int64_t shown_at = 0;  // the step after which the present pauses were shown first; the largest number if never
    std::vector<Slowness> paused{};  // the spans of pauses that have been shown
  };
  // The compute times of one step.
  struct Row {
    std::int64_t step;
    std::vector<double> seconds;
    std::vector<double> usual;   // for each rank: the median time of the other ranks
    std::vector<double> ratios;  // for each rank: log(seconds / usual); NaN if the rank did not take part
    double median;               // the median time of all ranks
  };
  std::vector<double> Levels(const Row& row) const;
  void Compare(const Row& row, std::vector<News>& news);
  void Show(Rank rank, SlowRank::Change slow, std::vector<News>& news);

  std::vector<JudgedRank> members_;
  RarePauses pauses_;
  StepNoise noise_;         // the noise of Row::ratios
  StepNoise level_noise_;   // the noise of the values that Levels returns
  std::vector<Row> first_;  // the first steps, until the noise is known
  std::int64_t steps_ = 0;  // the number of steps so far in which two ranks or more took part
  double usual_ = 0;        // the mean over recent steps of Row::median, but of 3 times the mean before at most
  double median_ = 0;       // Row::median of the last step
};

}  // namespace horovod_partial
