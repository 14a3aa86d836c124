#include "core/quorum/step_window.h"

#include <algorithm>
#include <array>

#include "core/values/median.h"

namespace horovod_partial {
namespace {

constexpr std::size_t kCapacity = StepWindow::kRounds;  // the number of steps that are kept of each rank
constexpr std::size_t kPauses = 2;                      // this many of the longest delays count as pauses of the system
// The number of steps that a rank must have before one of them can be recognised as delayed.
constexpr std::size_t kEnough = 4;

using Steps = std::vector<Time>;

// Finds the steps that exceed the median of their rank most. LeaveOut replaces each of these steps by that median.
class Pauses {
 public:
  void Look(Steps& steps, std::size_t first) {
    if (steps.size() - first < kEnough) return;
    const Time usual = Median(Steps(steps.begin() + static_cast<std::ptrdiff_t>(first), steps.end()));
    for (std::size_t i = first; i < steps.size(); ++i) {
      Pause pause{steps[i] - usual, i, usual};
      for (Pause& longer : longest_)
        if (pause.delay > longer.delay) std::swap(pause, longer);
    }
  }
  void LeaveOut(Steps& steps) const {
    for (const Pause& pause : longest_)
      if (pause.delay > Time(0)) steps[pause.step] = pause.usual;
  }

 private:
  struct Pause {
    Time delay{0};
    std::size_t step = 0;
    Time usual{0};
  };
  std::array<Pause, kPauses> longest_;
};

}  // namespace

void StepWindow::End(Rank rank, Round round, Time at, int steps) {
  RankSteps& own = At(rank);
  if (own.began == kNever) return;
  const Time length = std::max(at - own.began, Time(0)) / steps;
  own.began = kNever;
  for (int i = 0; i < steps; ++i) {
    if (own.steps.size() < kCapacity) {
      own.steps.push_back({round, length});
    } else {
      own.steps[own.next] = {round, length};
    }
    own.next = (own.next + 1) % kCapacity;
  }
}

void StepWindow::Leave(Rank rank) {
  At(rank).out = true;
  At(rank).began = kNever;
}

StepSample StepWindow::Sample(Round round, Time now) const {
  StepSample sample;
  Pauses pauses;
  for (const RankSteps& rank : ranks_) {
    if (rank.out) continue;
    const std::size_t first = sample.steps.size();
    const std::size_t oldest = rank.steps.size() < kCapacity ? 0 : rank.next;
    Time longest{0};
    for (std::size_t i = 0; i < rank.steps.size(); ++i) {
      const Step& step = rank.steps[(oldest + i) % rank.steps.size()];
      if (step.round < round - kRounds) continue;
      sample.steps.push_back(step.length);
      longest = std::max(longest, step.length);
    }
    if (rank.began != kNever && now - rank.began > longest) sample.steps.push_back(now - rank.began);
    if (sample.steps.size() == first) continue;
    sample.begin.push_back(first);
    pauses.Look(sample.steps, first);
  }
  sample.begin.push_back(sample.steps.size());
  pauses.LeaveOut(sample.steps);
  if (!sample.steps.empty()) sample.usual = Median(sample.steps);
  for (std::size_t rank = 0; rank + 1 < sample.begin.size(); ++rank) {
    Time busy{0};
    for (std::size_t i = sample.begin[rank]; i < sample.begin[rank + 1]; ++i) busy += sample.steps[i];
    sample.span = std::max(sample.span, busy);
  }
  return sample;
}

}  // namespace horovod_partial
