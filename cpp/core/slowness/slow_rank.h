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
  kPauses,      // now and then a single step takes so long that the others wait for much of the time
};
constexpr std::array<const char*, 5> NamesOf(SlownessKind) {
  return {"persistent", "growing", "bursts", "random", "pauses"};
}

// A span of steps, of which all or some are slow. A step is slow if its compute time is clearly above the median of the
// other ranks in that step.
struct Slowness {
  Rank rank = 0;
  SlownessKind kind = SlownessKind::kPersistent;
  std::int64_t begin = 0;   // the first slow step
  std::int64_t end = -1;    // the first step that is not slow any more; -1 while the rank is slow
  std::int64_t steps = 0;   // the number of slow steps, or of pauses
  std::int64_t length = 0;  // the number of steps from `begin` to `end`; while the rank is slow, to its last slow step
  // A slow step takes `factor` times as long as the other ranks' median for that step. `factor` is the median over the
  // last slow steps. Its 95 % interval goes from `low` to `high`. For kPauses all three are the time of the job divided
  // by what that would be without the pauses.
  double factor = 1, low = 1, high = 1;
  double burst = 0;   // kBursts: the median length of a burst, in steps; otherwise 0
  double period = 0;  // kBursts, kPauses: the median number of steps from one start to the next one; otherwise 0
  double pause = 0;   // kPauses: the median length of a pause, in seconds; otherwise 0
  double share = 0;   // kPauses: the share of the time since `begin` for which the others waited; otherwise 0
  double lost = 0;    // the rank's time beyond the other ranks' median, in units of the median rank's usual step

  template <class Self>
  static auto Fields(Self& self) {
    return std::tuple(Named("rank", self.rank), Named("kind", self.kind), Named("begin", self.begin),
                      Named("end", self.end), Named("steps", self.steps), Named("length", self.length),
                      Named("factor", self.factor), Named("low", self.low), Named("high", self.high),
                      Named("burst", self.burst), Named("period", self.period), Named("pause", self.pause),
                      Named("share", self.share), Named("lost", self.lost));
  }

  // Says how slow the rank is: the rest of a sentence that begins with the rank's name.
  std::string Describe() const;
};

// One step of a rank, compared with the same step of the other ranks.
struct ComparedStep {
  std::int64_t step = 0;
  double ratio = 0;   // the logarithm of the rank's compute time divided by the other ranks' median
  double level = 0;   // log(likelihood of this step if nearly all steps are slow / likelihood if the rank is not slow)
  bool slow = false;  // true if the step is clearly longer than the other ranks' median
  double chance = 0.1;  // the probability that a step is slow by chance, estimated from the other ranks
  double lost = 0;      // the time beyond the other ranks' median, in units of the median rank's usual step
};

// Decides whether a rank is slow, by sums of log-likelihood ratios (Page's cumulative sums, Biometrika 41, 1954). Each
// of four sums compares the hypothesis that a certain share of the last steps is slow with the hypothesis that the rank
// is not slow. A sum that falls to 0 starts anew. When a sum reaches a threshold, the rank counts as slow since the
// start of that sum. From then on an opposite sum collects evidence that the rank is no longer slow. When the opposite
// sum reaches a threshold, the rank counts as not slow since the start of the opposite sum.
class SlowRank {
 public:
  static constexpr double kMostEvidence = 2.5;  // one step changes a sum by this much at most

  // `size`: the number of ranks. The more ranks there are, the more evidence is needed before a rank counts as slow.
  // Otherwise one of many ranks would often seem slow by chance.
  SlowRank(Rank rank, int size);

  enum class Change : std::uint8_t { kNone, kBegins, kChanges, kEnds };
  // Steps must be observed in order.
  Change Observe(const ComparedStep& step);
  // Forgets that some steps are slow, because they are pauses, which are told apart.
  void ForgetSome();

  // Returns the spans in which the rank was slow, oldest first, at most 1,000. While the rank is slow, the last span
  // has the end -1.
  const std::vector<Slowness>& found() const { return found_; }
  bool slow() const { return !found_.empty() && found_.back().end < 0; }

 private:
  // The hypotheses about a slow rank, by index: the share of its steps that is slow. Hypothesis kAll says "nearly all".
  static constexpr std::size_t kAll = 0;
  static constexpr std::array<double, 4> kShares = {0.9, 0.4, 0.15, 0.06};

  // What some steps have cost.
  struct Cost {
    std::int64_t slow = 0;  // the number of slow steps
    double lost = 0;        // the sum of ComparedStep::lost
    void Add(const Cost& more) {
      slow += more.slow;
      lost += more.lost;
    }
  };
  // The evidence for one of the hypotheses in kShares, summed from the step `begin` on.
  struct Evidence {
    double sum = 0;
    std::int64_t begin = 0;
    Cost cost;
  };
  // Consecutive steps to which one of the hypotheses in kShares applies.
  struct Span {
    std::size_t which = kAll;
    std::int64_t begin = 0;
    std::int64_t end = 0;  // the step after the last one that surely belongs to the span
    double over = 0;       // the evidence that the span ended at `end`
    Cost cost;             // of the steps before `end`
    Cost since{};          // of the steps from `end` on
  };
  // Returns true if nearly all steps of a span are slow, whichever hypothesis has found it. Evidence for kAll grows
  // slowly where other ranks vary much, so one of the other hypotheses may find a rank that is slow in each of its last
  // steps.
  static bool IsNearlyAll(const Span& span);
  static double Likelihood(const ComparedStep& step, std::size_t which);
  static bool IsSlow(const ComparedStep& step, std::size_t which) { return which == kAll ? step.level > 0 : step.slow; }
  bool in_bursts() const { return slow() && found_.back().kind == SlownessKind::kBursts; }
  std::optional<std::size_t> Begins(const ComparedStep& step);
  void Begin(std::size_t which, const ComparedStep& step);
  void Extend(const ComparedStep& step);
  Change End();
  void LookBack();
  bool Grows() const;
  Change Tell(std::int64_t step);
  Change Found(SlownessKind kind, std::int64_t begin, Change change);
  void Measure(Slowness& told) const;

  const Rank rank_;
  const double begin_;  // the rank counts as slow when a sum reaches this threshold
  std::array<Evidence, kShares.size()> evidence_;
  std::deque<ComparedStep> steps_;  // the last steps, from which factors and growth are computed
  std::optional<Span> span_;        // the span that has begun and has not ended, if there is one
  std::deque<Span> ended_;          // the last ended spans in which nearly all steps were slow
  Cost ended_cost_;                 // of the spans in `ended_`, and of older spans of the same bursts
  std::vector<Slowness> found_;
  double told_ = 1;  // the factor that was reported last
};

constexpr std::array<const char*, 4> NamesOf(SlowRank::Change) { return {"none", "begins", "changes", "ends"}; }

// Returns the median of one or more values. Of an even number of values it is the upper of the two in the middle.
template <class Value>
Value Median(std::vector<Value> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace horovod_partial
