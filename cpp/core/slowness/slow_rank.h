// The evidence against one rank: whether it is slow, since which step, how slow, and in what way.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// In what way a rank is slow.
enum class SlownessKind : std::uint8_t {
  kPersistent,  // nearly all steps are slow
  kGrowing,     // nearly all steps are slow, and they become slower
  kBursts,      // slow for several steps in a row, and again later
  kRandom,      // some steps are slow, one by one
};
constexpr std::array<const char*, 4> NamesOf(SlownessKind) { return {"persistent", "growing", "bursts", "random"}; }

// Several steps of a rank that are slow, or many of which are. A step is slow if its compute time is clearly above the
// median of the other ranks in that step.
struct Slowness {
  Rank rank = 0;
  SlownessKind kind = SlownessKind::kPersistent;
  std::int64_t begin = 0;   // the first slow step
  std::int64_t end = -1;    // the first step that is not slow any more; -1 while the rank is slow
  std::int64_t steps = 0;   // the number of slow steps
  std::int64_t length = 0;  // the number of steps from `begin` to `end`, or to the last one that counts so far
  // How many times as long as the median of the other ranks the slow steps take: the median, and its 95 % interval.
  double factor = 1, low = 1, high = 1;
  double burst = 0;   // kBursts: the median length of a burst, in steps; otherwise 0
  double period = 0;  // kBursts: the median number of steps from the begin of a burst to that of the next; otherwise 0
  double lost = 0;    // by how many steps of the median rank this rank has held up the others since `begin`

  template <class Self>
  static auto Fields(Self& self) {
    return std::tuple(Named("rank", self.rank), Named("kind", self.kind), Named("begin", self.begin),
                      Named("end", self.end), Named("steps", self.steps), Named("length", self.length),
                      Named("factor", self.factor), Named("low", self.low), Named("high", self.high),
                      Named("burst", self.burst), Named("period", self.period), Named("lost", self.lost));
  }

  // Says how slow the rank is: the rest of a sentence that begins with the rank's name.
  std::string Describe() const;
};

// One step of a rank, compared with the same step of the other ranks.
struct ComparedStep {
  std::int64_t step = 0;
  double ratio = 0;     // the logarithm of the rank's compute time over the median of the other ranks'
  double level = 0;     // the logarithm of how much likelier this step is if nearly all steps of the rank are slow
  bool slow = false;    // clearly longer than the median of the other ranks
  double chance = 0.1;  // how likely a step is slow by chance
  double lost = 0;      // by how much it is longer than the median of the other ranks, in usual steps
};

// Sums up the evidence that a rank is slow, by log-likelihood ratios (Page's cumulative sums, Biometrika 41, 1954). One
// sum tells how much likelier the steps since its begin are if nearly all of them are slow. Three more sums do the same
// for a share of slow steps. When a sum is large enough, the rank is slow since the begin of the sum. From then on the
// opposite sum tells how much likelier the last steps are if the rank is not slow. When that one is large enough, the
// rank has not been slow since the begin of the opposite sum.
class SlowRank {
 public:
  static constexpr double kMostEvidence = 2.5;  // the most that one step tells for or against a rank

  // One of `size` ranks. The more ranks there are, the more evidence a begin takes, so that chance accuses none of
  // them.
  SlowRank(Rank rank, int size);

  enum class Change : std::uint8_t { kNone, kBegins, kChanges, kEnds };
  // Steps must be observed in order.
  Change Observe(const ComparedStep& step);

  // The times when the rank was slow, oldest first; the last 1,000. The end of the last one is -1 while it lasts.
  const std::vector<Slowness>& found() const { return found_; }

 private:
  // What may be the case: number 0 says that nearly all steps are slow, and the others that a share of them is.
  static constexpr std::size_t kAll = 0;
  static constexpr std::array<double, 4> kShares = {0.9, 0.4, 0.15, 0.06};

  // The evidence for one of these, since the step `begin`.
  struct Evidence {
    double sum = 0;
    std::int64_t begin = 0;
    std::int64_t slow = 0;  // the number of slow steps
    double lost = 0;
  };
  // Steps in a row that are slow, or some of which are.
  struct Span {
    std::size_t which = kAll;
    std::int64_t begin = 0;
    std::int64_t end = 0;         // the first step that may not belong to it
    double over = 0;              // the evidence that it ended at `end`
    std::int64_t slow = 0;        // the number of slow steps before `end`
    double lost = 0;              // before `end`
    std::int64_t slow_since = 0;  // the same from `end` on
    double lost_since = 0;
  };
  static double Likelihood(const ComparedStep& step, std::size_t which);
  static bool IsSlow(const ComparedStep& step, std::size_t which) { return which == kAll ? step.level > 0 : step.slow; }
  bool slow() const { return !found_.empty() && found_.back().end < 0; }
  bool in_bursts() const { return slow() && found_.back().kind == SlownessKind::kBursts; }
  std::optional<std::size_t> Begins(const ComparedStep& step);
  void Begin(std::size_t which, const ComparedStep& step);
  void Extend(const ComparedStep& step);
  Change End();
  void ForgetEnded();
  bool Grows() const;
  Change Tell(std::int64_t step);
  Change Found(SlownessKind kind, std::int64_t begin, Change change);
  void Measure(Slowness& told) const;

  const Rank rank_;
  const double begin_;  // the least evidence for a begin
  std::array<Evidence, kShares.size()> evidence_;
  std::deque<ComparedStep> steps_;  // the last steps, for factors and growth
  std::optional<Span> span_;        // the present one
  std::deque<Span> ended_;          // the last ones in which nearly all steps were slow
  std::int64_t ended_slow_ = 0;     // the number of slow steps in all of these, those that were forgotten included
  double ended_lost_ = 0;           // and what these spans cost
  std::vector<Slowness> found_;
  double told_ = 1;  // the factor that was told last
};

constexpr std::array<const char*, 4> NamesOf(SlowRank::Change) { return {"none", "begins", "changes", "ends"}; }

// Returns the median of one value or more; of an even number of values, the upper one of the two in the middle.
template <class Value>
Value Median(std::vector<Value> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace horovod_partial
