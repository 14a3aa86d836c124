#include "core/slowness/rare_pauses.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace horovod_partial {
namespace {

constexpr double kFalse = 0.001;     // if all ranks are alike, one is found with this probability at most
constexpr double kLeastCost = 0.02;  // the least share of the time that is lost if all pauses are like the shortest
constexpr double kMain = 0.8;        // of all lengths the longest is told that has this part of the largest share
constexpr std::size_t kKept = 64, kLeast = 3;  // how many pauses are kept; how many are evidence at least
// A pause counts if more than kApart steps have passed since the last one, and more than kLong / its length in usual
// steps. What comes more often is slowness at random, or bursts.
constexpr double kApart = 8, kLong = 64;
// Pauses are over when none has come for kPatience periods, or for kMostPatience steps if these are fewer, but not
// before kLonger times the longest period has passed.
constexpr double kPatience = 3, kMostPatience = 1000, kLonger = 1.5;

}  // namespace

// Returns the logarithm of what the better bet has won since the first pause that is kept.
double RarePauses::Track::Evidence() const {
  double most = 0;
  for (std::size_t i = 0; i < kStakes.size() && !pauses.empty(); ++i)
    most = std::max(most, won[i] - pauses.front().won[i]);
  return most;
}

// Returns for which share of the time the others have waited for these pauses, from the end of the first one on.
double RarePauses::Track::Share() const {
  double lost = 0;
  for (std::size_t i = 1; i < pauses.size(); ++i) lost += pauses[i].seconds;
  return lost / (pauses.back().time - pauses.front().time);
}

// Returns the numbers of steps between pauses, from the one with the index `from` on.
std::vector<double> RarePauses::Track::Periods(std::size_t from) const {
  std::vector<double> periods;
  for (std::size_t i = from + 1; i < pauses.size(); ++i)
    periods.push_back(static_cast<double>(pauses[i].step - pauses[i - 1].step));
  return periods;
}

// Returns for how many steps after a pause the next one is expected.
double RarePauses::Track::Patience(std::size_t from) const {
  const std::vector<double> periods = Periods(from);
  return std::max(kLonger * *std::max_element(periods.begin(), periods.end()),
                  std::min(kPatience * Median(periods), kMostPatience));
}

// Leaves out the oldest pauses.
void RarePauses::Track::Forget(std::size_t count) {
  pauses.erase(pauses.begin(), pauses.begin() + static_cast<std::ptrdiff_t>(count));
  before += static_cast<std::int64_t>(count);
  suffices = suffices && !pauses.empty();
}

void RarePauses::Observe(std::int64_t step, const std::vector<double>& seconds, double median, double usual) {
  double longest = median;
  for (const double one : seconds) longest = one > longest ? one : longest;  // NaN is not larger
  time_ += longest;
  for (std::size_t which = 0; which < kLengths.size() && longest - median >= kLengths[which] * usual; ++which)
    Bet(which, step, seconds, median, usual);
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) Judge(static_cast<Rank>(rank), step, usual);
}

// Settles the bets on pauses of one length in this step.
void RarePauses::Bet(std::size_t which, std::int64_t step, const std::vector<double>& seconds, double median,
                     double usual) {
  const double least = median + kLengths[which] * usual, apart = std::max(kApart, kLong / kLengths[which]);
  const auto counts = [&](std::size_t rank) {
    return !std::isnan(seconds[rank]) && static_cast<double>(step - ranks_[rank].tracks[which].last) > apart;
  };
  double all = 0, pausing = 0;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    all += counts(rank) ? 1 : 0;
    pausing += counts(rank) && seconds[rank] >= least ? 1 : 0;
  }
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    Track& track = ranks_[rank].tracks[which];
    const bool pauses = seconds[rank] >= least;
    const bool is_too_often = pauses && static_cast<double>(step - track.last) > kApart && !counts(rank);
    if (is_too_often && !track.suffices) track.Forget(track.pauses.size());
    if (pausing > 0 && counts(rank)) {
      if (pauses) {
        if (track.pauses.size() == kKept) track.Forget(1);
        track.pauses.push_back({step, seconds[rank] - median, time_, track.won});
        ranks_[rank].pauses = true;
      }
      for (std::size_t i = 0; i < kStakes.size(); ++i)
        track.won[i] += (pauses ? std::log(kStakes[i]) : 0) - std::log1p((kStakes[i] - 1) * pausing / all);
      if (track.Evidence() <= 0) track.Forget(track.pauses.size());
    }
    if (pauses) track.last = step;
  }
}

// The more often the evidence has begun anew, the more of it is needed.
bool RarePauses::IsEnough(const Track& track) const {
  const auto bets = static_cast<double>(ranks_.size() * kLengths.size() * kStakes.size());
  return track.pauses.size() >= kLeast &&
         track.Evidence() > std::log(bets / kFalse) + 6 * std::log1p(static_cast<double>(track.before));
}

// Updates the finding about a rank.
void RarePauses::Judge(Rank number, std::int64_t step, double usual) {
  JudgedRank& rank = ranks_[Index(number)];
  const bool pauses = std::exchange(rank.pauses, false), was_found = rank.found && rank.found->end < 0;
  rank.change = SlowRank::Change::kNone;
  if (!pauses && !(was_found && step > rank.until)) return;
  double most = 0;
  const Track* main = nullptr;
  const Pause* present = nullptr;
  for (Track& track : rank.tracks) {
    const bool is_present = !track.pauses.empty() && track.pauses.back().step == step;
    if (is_present && !track.suffices && IsEnough(track)) {
      // Pauses long before the others are no evidence.
      for (std::size_t i = track.pauses.size() - kLeast; i > 0; --i)
        if (static_cast<double>(track.pauses[i].step - track.pauses[i - 1].step) > track.Patience(i)) {
          track.Forget(i);
          break;
        }
      double shortest = track.pauses.front().seconds;
      for (const Pause& pause : track.pauses) shortest = std::min(shortest, pause.seconds);
      const double time = track.pauses.back().time - track.pauses.front().time;
      const double cost = shortest * static_cast<double>(track.pauses.size() - 1) / time;
      track.suffices = IsEnough(track) && (was_found || cost > kLeastCost);
    }
    if (track.suffices && static_cast<double>(step - track.pauses.back().step) > track.Patience(0))
      track.Forget(track.pauses.size());
    if (!track.suffices) continue;
    if (is_present) present = &track.pauses.back();
    if (track.Share() >= kMain * most) main = &track;
    most = std::max(most, track.Share());
  }
  if (main == nullptr && was_found) {
    rank.found->end = rank.found->begin + rank.found->length;
    rank.change = SlowRank::Change::kEnds;
    for (Track& track : rank.tracks) track = Track{track.last};
  }
  if (main == nullptr) return;
  rank.until = main->pauses.back().step + std::llround(main->Patience(0));
  if (present == nullptr) return;
  rank.change = was_found ? SlowRank::Change::kChanges : SlowRank::Change::kBegins;
  if (!was_found) rank.found = Slowness{number, SlownessKind::kPauses, main->pauses.front().step};
  Slowness& found = *rank.found;
  std::vector<double> seconds;
  double lost = 0;
  for (const Pause& pause : main->pauses) {
    seconds.push_back(pause.seconds);
    lost += pause.seconds;
  }
  found.steps += was_found ? 1 : static_cast<std::int64_t>(main->pauses.size());
  found.lost += (was_found ? present->seconds : lost) / usual;
  found.length = step + 1 - found.begin;
  found.pause = Median(seconds);
  found.period = Median(main->Periods(0));
  found.share = main->Share();
  found.factor = found.low = found.high = 1 / (1 - found.share);
}

}  // namespace horovod_partial
