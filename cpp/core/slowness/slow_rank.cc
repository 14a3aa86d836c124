#include "core/slowness/slow_rank.h"

#include <cmath>
#include <iomanip>
#include <sstream>
#include <utility>

namespace horovod_partial {
namespace {

constexpr double kBegin = 10, kEnd = 8;  // the evidence at which slowness begins (with few ranks) or ends
constexpr double kNearlyAll = 5;         // with this much evidence for kAll, no other hypothesis is accepted
constexpr double kMostly = 0.7;          // from this share of slow steps on, "nearly all" fits better than 40 %
constexpr double kLeastLost = 2;         // a rank counts as slow only if its slowness has cost this many steps,
constexpr double kLeastCost = 0.01;      // and this share of all steps since the slowness began
constexpr std::size_t kKept = 512;       // the number of steps that are kept
constexpr std::size_t kSpans = 64;       // the number of ended spans that are kept
constexpr std::size_t kFound = 1000;     // the number of items of `found_` that are kept
constexpr std::size_t kFactors = 64;     // the most slow steps from which a factor is computed
constexpr std::size_t kGrowth = 256, kLeastGrowth = 32;  // Grows looks at so many steps, at most and at least
constexpr std::int64_t kShort = 10;                      // a pause shorter than the span / kShort does not end the span
constexpr double kMuch = 1.5;       // a factor is reported again if it has surely changed by this factor
constexpr std::int64_t kRare = 20;  // bursts: each pause is at most kRare times as long as the burst before
// Bursts are over when none has begun for kPatience periods, or for kMostPatience steps if these are fewer, but not
// before 1.5 periods have passed. A span longer than kPatience periods is no burst: the slowness is then persistent.
constexpr double kPatience = 3, kMostPatience = 1000;
constexpr std::int64_t kOften = 32;  // Grows is called once in so many steps

// Returns a factor as text. The larger the factor, the fewer decimals it gets.
std::string Factor(double factor) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(factor < 2 ? 2 : factor < 10 ? 1 : 0) << factor;
  return text.str();
}

}  // namespace

std::string Slowness::Describe() const {
  std::ostringstream text;
  if (kind == SlownessKind::kPauses) {
    text << "pauses for " << (pause < 0.1 ? Factor(1e3 * pause) + " ms" : Factor(pause) + " s") << " every "
         << std::llround(period) << " steps: the others wait for it for " << std::lround(100 * share)
         << " % of the time, ";
  } else {
    text << "takes " << Factor(factor) << " times (95 %: " << Factor(low) << " to " << Factor(high)
         << ") as long as the median rank, in " << steps << " of " << length << " steps ";
  }
  text << (end < 0 ? "since step " : "from step ") << begin;
  if (end >= 0) text << " to " << end - 1;
  if (kind == SlownessKind::kGrowing) text << ", and becomes slower";
  if (kind == SlownessKind::kBursts)
    text << ", in bursts of " << std::llround(burst) << " steps every " << std::llround(period);
  if (kind == SlownessKind::kRandom) text << ", at random";
  return text.str();
}

SlowRank::SlowRank(Rank rank, int size) : rank_(rank), begin_(kBegin + std::log(size)) {}

SlowRank::Change SlowRank::Observe(const ComparedStep& step) {
  steps_.push_back(step);
  if (steps_.size() > kKept) steps_.pop_front();
  if (span_) Extend(step);
  const auto which = Begins(step);
  const bool is_new = !span_ || (which == kAll && !in_bursts() && !IsNearlyAll(*span_));
  if (which && is_new) Begin(*which, step);
  if (span_ && span_->over >= kEnd) return End();
  return Tell(step.step);
}

void SlowRank::ForgetSome() {
  const Evidence all = evidence_[kAll];
  evidence_ = {};
  evidence_[kAll] = all;
  if (!span_ || in_bursts() || IsNearlyAll(*span_)) return;
  span_.reset();
  found_.pop_back();
}

// Returns log(likelihood of the step under hypothesis `which` / likelihood of the step if the rank is not slow).
double SlowRank::Likelihood(const ComparedStep& step, std::size_t which) {
  if (which == kAll) return step.level;
  const double share = std::max(kShares[which], std::min(1.5 * step.chance, kShares[kAll]));
  return step.slow ? std::min(std::log(share / step.chance), kMostEvidence) : std::log((1 - share) / (1 - step.chance));
}

// Adds a step to the evidence for each hypothesis. Returns the hypothesis with the most evidence, if any has enough.
std::optional<std::size_t> SlowRank::Begins(const ComparedStep& step) {
  std::optional<std::size_t> best;
  for (std::size_t which = 0; which < kShares.size(); ++which) {
    Evidence& of = evidence_[which];
    if (of.sum <= 0) of = {0, step.step, {}};
    of.sum += which != kAll && kShares[which] <= step.chance ? -1 : Likelihood(step, which);
    of.cost.Add({IsSlow(step, which) ? 1 : 0, step.lost});
    const auto steps = static_cast<double>(step.step - of.begin + 1);
    const double least_lost = std::max(kLeastLost, steps * kLeastCost);
    // If nearly all of the last steps are slow, kAll may have enough evidence soon. Other hypotheses wait for it until
    // a step is not slow. Between bursts, only another burst can begin.
    const bool waits = which != kAll && evidence_[kAll].sum >= kNearlyAll;
    const bool fits =
        IsNearlyAll({which, of.begin, step.step + 1, 0, of.cost}) ? !waits || !step.slow : !waits && !in_bursts();
    // If a share of the steps is slow anyway, several slow steps in a row are likely. So more evidence is needed.
    const double least = span_ && span_->which != kAll ? 2 * begin_ : begin_;
    const bool enough = fits && of.sum >= least && of.cost.lost >= least_lost;
    if (enough && (!best || of.sum > evidence_[*best].sum)) best = which;
  }
  return best;
}

bool SlowRank::IsNearlyAll(const Span& span) {
  const auto steps = static_cast<double>(span.end - span.begin);
  return span.which == kAll || static_cast<double>(span.cost.slow) >= kMostly * steps;
}

void SlowRank::Begin(std::size_t which, const ComparedStep& step) {
  const Evidence evidence = evidence_[which];
  if (span_) {  // until now a share of the steps was slow; from now on nearly all are
    Slowness& some = found_.back();
    Measure(some);
    for (const ComparedStep& one : steps_)
      if (one.slow && one.step >= evidence.begin && one.step < span_->end) --some.steps;
    some.lost = std::max(0.0, some.lost - evidence.cost.lost);
    some.end = evidence.begin;
    some.length = some.end - some.begin;
    if (some.length <= 0) found_.pop_back();
  }
  Span span;
  span.which = which;
  span.begin = evidence.begin;
  span.end = step.step + (IsSlow(step, which) ? 1 : 0);
  span.cost = evidence.cost;
  if (IsNearlyAll(span) && !in_bursts() && !ended_.empty()) {
    const Span last = ended_.back();
    const std::int64_t gap = evidence.begin - last.end, length = last.end - last.begin;
    if (gap > kRare * length) {
      ended_.clear();
      ended_cost_ = {};
    }
    if (kShort * gap < length) {  // the pause was short, so the earlier span goes on
      span.begin = last.begin;
      span.cost.Add(last.cost);
      ended_.pop_back();
      ended_cost_.Add({-last.cost.slow, -last.cost.lost});
      if (!found_.empty() && found_.back().begin == last.begin) found_.pop_back();
    }
  }
  span_ = span;
  const Evidence all = evidence_[kAll];
  evidence_ = {};
  if (which != kAll) evidence_[kAll] = all;
}

void SlowRank::Extend(const ComparedStep& step) {
  Span& span = *span_;
  span.since.Add({IsSlow(step, span.which) ? 1 : 0, step.lost});
  span.over -= Likelihood(step, span.which);
  if (span.over > 0) return;
  span.over = 0;
  span.end = step.step + 1;
  span.cost.Add(std::exchange(span.since, {}));
}

// Adds a burst before those in `ended_`. Alone it had too little evidence, but as one of several it needs less.
void SlowRank::LookBack() {
  double most = kEnd;
  Evidence of;
  std::optional<Span> found;
  for (const ComparedStep& one : steps_) {
    if (one.step >= ended_.front().begin) break;
    if (of.sum <= 0) of = {0, one.step, {}};
    of.sum += one.level;
    of.cost.Add({one.level > 0 ? 1 : 0, one.lost});
    if (of.sum < most) continue;
    most = of.sum;
    found = Span{kAll, of.begin, one.step + 1, 0, of.cost};
  }
  if (!found || ended_.front().begin - found->end > kRare * (found->end - found->begin)) return;
  ended_.push_front(*found);
  ended_cost_.Add(found->cost);
}

// Ends the present span. Returns the change to report. A pause between bursts is no change.
SlowRank::Change SlowRank::End() {
  const bool bursts = in_bursts();
  if (!bursts && slow()) {
    Measure(found_.back());
    found_.back().end = span_->end;
  }
  if (bursts || IsNearlyAll(*span_)) {
    ended_.push_back(*span_);
    ended_cost_.Add(span_->cost);
  }
  if (ended_.size() > kSpans) ended_.pop_front();
  span_.reset();
  evidence_ = {};
  return bursts ? Change::kNone : Change::kEnds;
}

// Returns true if the steps of the present span become slower. For this each quarter of them must be slower than the
// quarter before, by more than chance explains, and the last quarter must be 10 % slower than the first.
bool SlowRank::Grows() const {
  std::vector<double> ratios;
  for (const ComparedStep& one : steps_)
    if (one.step >= span_->begin) ratios.push_back(one.ratio);
  if (ratios.size() < kLeastGrowth) return false;
  if (ratios.size() > kGrowth) ratios.erase(ratios.begin(), ratios.end() - static_cast<std::ptrdiff_t>(kGrowth));
  constexpr std::size_t kParts = 4;
  const std::size_t size = ratios.size() / kParts;
  std::array<double, kParts> means{};
  double squares = 0;
  for (std::size_t part = 0; part < kParts; ++part) {
    const double* first = ratios.data() + part * size;
    for (std::size_t i = 0; i < size; ++i) means[part] += first[i] / static_cast<double>(size);
    for (std::size_t i = 0; i < size; ++i) squares += (first[i] - means[part]) * (first[i] - means[part]);
  }
  const double error = std::sqrt(2 * squares / static_cast<double>(kParts * size) / static_cast<double>(size));
  for (std::size_t part = 1; part < kParts; ++part)
    if (means[part] - means[part - 1] <= 2 * error) return false;
  return means[kParts - 1] - means[0] >= std::log(1.1);
}

// Updates `found_` after a step. Returns the change to report.
SlowRank::Change SlowRank::Tell(std::int64_t step) {
  if (in_bursts()) {
    const double period = found_.back().period;
    if (span_ && static_cast<double>(span_->end - span_->begin) <= kPatience * period) {
      Measure(found_.back());
      return Change::kNone;
    }
    const double patience = std::max(1.5 * period, std::min(kPatience * period, kMostPatience));
    if (!span_ && static_cast<double>(step - ended_.back().begin) <= patience) return Change::kNone;
    const std::optional<Span> present = std::exchange(span_, std::nullopt);
    Slowness& over = found_.back();
    Measure(over);
    over.end = ended_.back().end;
    if (ended_.size() == 1) over.kind = SlownessKind::kPersistent;  // what seemed to be a second burst is none
    ended_.clear();
    ended_cost_ = {};
    span_ = present;
    return span_ ? Found(SlownessKind::kPersistent, span_->begin, Change::kChanges) : Change::kEnds;
  }
  if (!span_) return Change::kNone;
  const bool nearly_all = IsNearlyAll(*span_);
  if (nearly_all && !ended_.empty()) {
    // The earlier bursts are in `found_` one by one. A single item for all bursts replaces them.
    LookBack();
    const std::int64_t first = ended_.front().begin;
    while (!found_.empty() && found_.back().begin >= first) found_.pop_back();
    return Found(SlownessKind::kBursts, first, Change::kBegins);
  }
  const SlownessKind kind = nearly_all ? SlownessKind::kPersistent : SlownessKind::kRandom;
  if (!slow()) return Found(kind, span_->begin, Change::kBegins);
  Slowness& lasts = found_.back();
  Measure(lasts);
  const bool grows = nearly_all && (lasts.kind == SlownessKind::kGrowing || (step % kOften == 0 && Grows()));
  const SlownessKind before = std::exchange(lasts.kind, grows ? SlownessKind::kGrowing : kind);
  if (lasts.kind == before && lasts.low <= kMuch * told_ && lasts.high >= told_ / kMuch) return Change::kNone;
  told_ = lasts.factor;
  return Change::kChanges;
}

// Adds an item to `found_`, and returns `change`.
SlowRank::Change SlowRank::Found(SlownessKind kind, std::int64_t begin, Change change) {
  found_.push_back({rank_, kind, begin});
  if (found_.size() > kFound) found_.erase(found_.begin());
  Measure(found_.back());
  told_ = found_.back().factor;
  return change;
}

// Computes the figures of `told`, the last item of `found_`, from the steps so far.
void SlowRank::Measure(Slowness& told) const {
  std::vector<double> ratios;
  const std::size_t which = span_ ? span_->which : kAll;
  for (auto one = steps_.rbegin(); one != steps_.rend() && one->step >= told.begin && ratios.size() < kFactors; ++one) {
    const bool counts = told.kind == SlownessKind::kBursts || which != kAll ? one->slow : one->step < span_->end;
    if (counts) ratios.push_back(one->ratio);
  }
  if (!ratios.empty()) {
    std::sort(ratios.begin(), ratios.end());
    const auto count = static_cast<double>(ratios.size());
    const double half = 0.98 * std::sqrt(count);  // the 95 % interval reaches this far from the middle value
    const auto at = [&](double index) {
      return std::exp(ratios[static_cast<std::size_t>(std::clamp(index, 0.0, count - 1))]);
    };
    told.factor = at((count - 1) / 2);
    told.low = at(std::floor(count / 2 - half) - 1);
    told.high = at(std::ceil(count / 2 + half));
  }
  Cost cost;
  if (told.kind == SlownessKind::kBursts) {
    cost = ended_cost_;
    told.length = ended_.back().end - told.begin;
    std::vector<double> lengths, periods;
    for (std::size_t i = 0; i < ended_.size(); ++i) {
      lengths.push_back(static_cast<double>(ended_[i].end - ended_[i].begin));
      const std::int64_t next = i + 1 < ended_.size() ? ended_[i + 1].begin : span_ ? span_->begin : ended_[i].begin;
      if (next > ended_[i].begin) periods.push_back(static_cast<double>(next - ended_[i].begin));
    }
    told.burst = Median(lengths);
    if (!periods.empty()) told.period = Median(periods);
  }
  if (span_) {
    cost.Add(span_->cost);
    told.length = span_->end - told.begin;
  }
  told.steps = cost.slow;
  told.lost = cost.lost;
}

}  // namespace horovod_partial
