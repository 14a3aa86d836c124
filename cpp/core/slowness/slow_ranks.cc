#include "core/slowness/slow_ranks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace horovod_partial {
namespace {

// The median absolute difference of two values from one normal distribution, divided by its standard deviation.
constexpr double kMedianDifference = 0.954;
// full() takes this quantile of the steps. In the steps above it a rank may become slow or fast, which is no noise.
constexpr double kMostSteps = 0.75;

constexpr double kLeastMean = 1.08;   // a step that is longer than other ranks' by this factor is evidence of slowness
constexpr double kLeastFactor = 1.1;  // a step is slow if it is longer than the other ranks' median by this factor,
constexpr double kDeviations = 3;     // and by this many standard deviations
constexpr std::size_t kLeastSteps = 3;  // the noise is known from this many steps on
constexpr double kShortest = 1e-6;      // shorter compute times count as this long, because they have no logarithm
constexpr double kRecent = 1.0 / 64;    // the weight of the newest step in a mean over recent steps
constexpr double kForget = 1.0 / 256;   // in the estimate of `chance` each step counts less than the next by this share
constexpr double kPriorChance = 0.1, kPrior = 50;  // `chance` is estimated as if kPrior steps came before
constexpr double kLeastChance = 0.01, kMostChance = 0.5;
constexpr std::size_t kPaused = 1000;         // the number of items of `paused` that are kept
constexpr double kMore = 1.5, kFarMore = 20;  // of two findings one is shown that costs more by such a factor

// Returns what a finding costs in each step, in units of a usual step.
double Cost(const Slowness& found) { return found.lost / static_cast<double>(found.length); }

// Returns the median of sorted values without the one at `left_out`.
double MedianWithout(const std::vector<double>& sorted, std::size_t left_out) {
  const std::size_t count = sorted.size() - 1;
  const auto at = [&](std::size_t i) { return sorted[i < left_out ? i : i + 1]; };
  return count % 2 == 1 ? at(count / 2) : (at(count / 2 - 1) + at(count / 2)) / 2;
}

}  // namespace

void StepNoise::Add(const std::vector<double>& values) {
  std::vector<double> changes;
  for (std::size_t rank = 0; rank < std::min(last_.size(), values.size()); ++rank) {
    const double change = std::abs(values[rank] - last_[rank]);
    if (!std::isnan(change)) changes.push_back(change);
  }
  last_ = values;
  if (changes.empty()) return;
  medians_[count_ % kSteps] = Median(changes);
  squares_[count_ % kSteps] =
      std::inner_product(changes.begin(), changes.end(), changes.begin(), 0.0) / static_cast<double>(changes.size());
  ++count_;
}

double StepNoise::Quantile(std::array<double, kSteps> of_steps, double quantile) const {
  if (count_ == 0) return 0;
  const auto count = static_cast<std::ptrdiff_t>(steps());
  const auto at = of_steps.begin() + static_cast<std::ptrdiff_t>(quantile * static_cast<double>(count));
  std::nth_element(of_steps.begin(), at, of_steps.begin() + count);
  return *at;
}

double StepNoise::typical() const { return Quantile(medians_, 0.5) / kMedianDifference; }

double StepNoise::full() const { return std::sqrt(Quantile(squares_, kMostSteps) / 2); }

SlowRanks::SlowRanks(int size) : pauses_(size) {
  for (Rank rank = 0; rank < size; ++rank) members_.push_back({SlowRank(rank, size)});
}

std::vector<SlowRanks::News> SlowRanks::Step(const std::vector<double>& seconds) {
  if (seconds.size() != members_.size())
    throw std::invalid_argument("a step needs a compute time for each of " + std::to_string(members_.size()) +
                                " ranks, not " + std::to_string(seconds.size()));
  Row row{steps_, seconds, seconds, seconds, 0};
  std::vector<double> sorted;
  for (double& one : row.seconds) {
    one = std::isfinite(one) ? std::max(one, kShortest) : std::numeric_limits<double>::quiet_NaN();
    if (!std::isnan(one)) sorted.push_back(one);
  }
  if (sorted.size() < 2) return {};
  ++steps_;
  std::sort(sorted.begin(), sorted.end());
  row.median = sorted[(sorted.size() - 1) / 2];
  for (std::size_t rank = 0; rank < row.seconds.size(); ++rank) {
    const double one = row.seconds[rank];
    if (std::isnan(one)) continue;
    const auto place = std::lower_bound(sorted.begin(), sorted.end(), one) - sorted.begin();
    row.usual[rank] = MedianWithout(sorted, static_cast<std::size_t>(place));
    row.ratios[rank] = std::log(one / row.usual[rank]);
  }
  noise_.Add(row.ratios);
  level_noise_.Add(Levels(row));
  first_.push_back(std::move(row));
  std::vector<News> news;
  if (noise_.steps() < kLeastSteps) return news;
  for (const Row& one : first_) Compare(one, news);
  first_.clear();
  return news;
}

// Returns a level for each rank: its clamped ratio, or how far that is above the mean of the other ranks, whichever is
// less. If all ranks have one distribution of times, a level is 0 or less on average. So neither one very fast rank nor
// a distribution that is not symmetric makes other ranks seem slow.
std::vector<double> SlowRanks::Levels(const Row& row) const {
  std::vector<double> levels = row.ratios;
  const double most = std::max(kDeviations * noise_.typical(), 2 * std::log(kLeastFactor));
  double sum = 0, count = 0;
  for (double& one : levels) {
    if (std::isnan(one)) continue;
    one = std::clamp(one, -most, most);
    sum += one;
    ++count;
  }
  for (double& one : levels) one = std::min(one, one - (sum - one) / (count - 1));
  return levels;
}

void SlowRanks::Compare(const Row& row, std::vector<News>& news) {
  double begins = 0, others = 0;
  for (const JudgedRank& member : members_) {
    begins += member.begins;
    others += member.others;
  }
  // One long step of most ranks changes nothing. If the next one is as long, steps have become longer.
  const double most =
      static_cast<std::size_t>(row.step) < StepNoise::kSteps ? row.median : std::max(3 * usual_, median_);
  const double median = std::min(row.median, most);
  median_ = row.median;
  usual_ += std::max(kRecent, 1 / static_cast<double>(row.step + 1)) * (median - usual_);
  pauses_.Observe(row.step, row.seconds, row.median, usual_);
  const double unsure = 1 + 4 / static_cast<double>(noise_.steps());
  const double least = std::max(std::log(kLeastFactor), unsure * kDeviations * noise_.typical());
  const std::vector<double> levels = Levels(row);
  // `deviation`: the noise of a level. `shift`: the assumed level of a slow rank. Levels above shift / 2 are evidence.
  const double deviation = std::max(unsure * level_noise_.full(), 1e-3);
  const double shift = std::max(2 * std::log(kLeastMean), deviation / 2);
  for (std::size_t rank = 0; rank < row.seconds.size(); ++rank) {
    const auto number = static_cast<Rank>(rank);
    const SlowRank::Change pauses = pauses_.change(number);
    if (std::isnan(row.seconds[rank]) || pauses == SlowRank::Change::kBegins || pauses == SlowRank::Change::kChanges) {
      Show(number, SlowRank::Change::kNone, news);
      continue;
    }
    JudgedRank& member = members_[rank];
    ComparedStep step;
    step.step = row.step;
    step.ratio = row.ratios[rank];
    step.slow = step.ratio > least;
    step.level = std::clamp((shift * levels[rank] - shift * shift / 2) / (deviation * deviation),
                            -SlowRank::kMostEvidence, SlowRank::kMostEvidence);
    step.lost = (row.seconds[rank] - row.usual[rank]) / usual_;
    const double begun = kPrior * kPriorChance + begins - member.begins;
    step.chance = std::clamp(begun / (kPrior + others - member.others), kLeastChance, kMostChance);
    member.begins *= 1 - kForget;
    member.others *= 1 - kForget;
    if (!member.was_slow) {
      member.begins += step.slow ? 1 : 0;
      member.others += 1;
    }
    member.was_slow = step.slow;
    Show(number, member.slow.Observe(step), news);
  }
}

// Chooses which finding of a rank is shown, after its slowness has changed by `slow`. Adds what is to be told to
// `news`.
void SlowRanks::Show(Rank rank, SlowRank::Change slow, std::vector<News>& news) {
  using Change = SlowRank::Change;
  const Change pauses = pauses_.change(rank);
  if (slow == Change::kNone && pauses == Change::kNone) return;
  JudgedRank& member = members_[Index(rank)];
  if (pauses == Change::kBegins) {
    member.slow.ForgetSome();
    member.shown_at = std::numeric_limits<std::int64_t>::max();
  }
  const std::vector<Slowness>& slowness = member.slow.found();
  const std::optional<Slowness>& found = pauses_.found(rank);
  const Shown before = member.shown;
  member.shown = member.slow.slow() ? Shown::kSlow : Shown::kNothing;
  // Hidden pauses are shown when the next one comes, so that pauses that end with the bursts around them are not shown.
  if (found && found->end < 0 && (before == Shown::kPauses || pauses != Change::kNone)) {
    // What costs more is shown. But slowness that begins after the pauses were told is shown unless it costs far less.
    const bool is_later =
        member.slow.slow() && slowness.back().kind != SlownessKind::kRandom && slowness.back().begin > member.shown_at;
    const double factor = (is_later ? kFarMore : 1) * (before == Shown::kPauses ? 1 : kMore);
    if (!member.slow.slow() || Cost(*found) > factor * Cost(slowness.back())) member.shown = Shown::kPauses;
  }
  if (member.shown == Shown::kPauses || before == Shown::kPauses) {
    if (member.paused.empty() || member.paused.back().begin != found->begin) member.paused.push_back(*found);
    if (member.paused.size() > kPaused) member.paused.erase(member.paused.begin());
    member.paused.back() = *found;
    if (member.shown != Shown::kPauses) member.paused.back().end = found->begin + found->length;
  }
  if (before == Shown::kSlow && slow == Change::kEnds) news.push_back({slow, slowness.back()});
  if (before == Shown::kPauses && pauses == Change::kEnds) news.push_back({pauses, *found});
  if (before != Shown::kPauses && member.shown == Shown::kPauses) {
    member.shown_at = std::min(member.shown_at, found->begin + found->length);
    news.push_back({Change::kBegins, *found});
  }
  if (member.shown == Shown::kSlow && (before != Shown::kSlow || slow != Change::kNone))
    news.push_back({before == Shown::kSlow ? slow : Change::kBegins, slowness.back()});
}

std::optional<Slowness> SlowRanks::present(Rank rank) const {
  const JudgedRank& member = members_.at(Index(rank));
  if (member.shown == Shown::kPauses) return member.paused.back();
  return member.slow.slow() ? std::optional(member.slow.found().back()) : std::nullopt;
}

std::vector<Slowness> SlowRanks::found(Rank rank) const {
  const JudgedRank& member = members_.at(Index(rank));
  std::vector<Slowness> found = member.slow.found();
  if (member.shown == Shown::kPauses && member.slow.slow()) found.pop_back();
  found.insert(found.end(), member.paused.begin(), member.paused.end());
  std::stable_sort(found.begin(), found.end(), [](const Slowness& one, const Slowness& other) {
    return std::pair(one.end < 0, one.begin) < std::pair(other.end < 0, other.begin);
  });
  return found;
}

}  // namespace horovod_partial
