#include "core/slowness/step_timer.h"

#include <limits>

namespace horovod_partial {

void Spans::Add(Time begin, Time end) {
  while (!spans_.empty() && spans_.back().second >= begin) {  // waits of two threads may overlap
    begin = std::min(begin, spans_.back().first);
    end = std::max(end, spans_.back().second);
    spans_.pop_back();
  }
  spans_.emplace_back(begin, end);
  if (spans_.size() > kMost) spans_.pop_front();
}

void Spans::ForgetBefore(Time time) {
  while (!spans_.empty() && spans_.front().second <= time) spans_.pop_front();
}

Time Spans::Within(Time begin, Time end) const {
  Time sum{0};
  for (const auto& [first, last] : spans_) sum += std::max(std::min(last, end) - std::max(first, begin), Time(0));
  return sum;
}

Time Spans::WithinBoth(Time begin, Time end, const Spans& others) const {
  Time sum{0};
  for (const auto& [first, last] : spans_) sum += others.Within(std::max(first, begin), std::min(last, end));
  return sum;
}

Time Spans::FirstBegin(Time time, Time end) const {
  for (const auto& [first, last] : spans_)
    if (first >= time) return std::min(first, end);
  return end;
}

void StepTimer::Arrived(const std::vector<std::string>& names, std::int64_t bucket, Time time, std::size_t bytes) {
  const std::int64_t step = counter_.Count(names);
  if (rows_.empty() || step != rows_.back().number) {
    PassOnBut(1);
    Row opened;
    opened.number = step;
    opened.begin = rows_.empty() ? resumed_ : std::max(resumed_, rows_.back().handed);
    rows_.push_back(std::move(opened));
    if (rows_.size() > kMost) {
      rows_.pop_front();
      follows_ = false;
    }
    for (Spans* spans : {&blocked_, &reductions_, &handed_}) spans->ForgetBefore(*rows_.front().begin);
  }
  handed_.Add(time, time);
  Row& row = rows_.back();
  bytes_ += bytes;
  report_.bytes += static_cast<std::int64_t>(bytes);
  row.bytes += bytes;
  row.handed = std::max(row.handed, time);
  row.outstanding.insert(bucket);
  if (bytes < row.most) return;
  row.most = bytes;
  row.bucket = bucket;
}

void StepTimer::Got(std::int64_t bucket, Time time, Round round, bool late, int staleness) {
  for (Row& row : rows_) {  // under work sharing all micro-batches of an update wait for this result
    if (row.outstanding.erase(bucket) == 0) continue;
    resumed_ = std::max(resumed_, time);
    row.result = std::max(row.result, time);
    row.round = std::max(row.round, round);
    row.late = row.late || late;
    row.staleness = std::max(row.staleness, staleness);
  }
}

void StepTimer::Waited(Time begin, Time end, bool for_round) {
  blocked_.Add(begin, end);
  if (for_round) resumed_ = std::max(resumed_, end);
}

void StepTimer::Marked(const Mark& mark) {
  optimizes_ = optimizes_ || mark.iterator == Mark::kOptimizer;
  marks_.push_back(mark);
  if (marks_.size() > kMostMarks) marks_.pop_front();
}

void StepTimer::Flush() {
  PassOnBut(0);
  rows_.clear();
  follows_ = false;
}

Parts StepTimer::PartsOf(Time begin, Time handed) const {
  const auto in_step = [&](const Mark& mark) { return mark.end > last_handed_ && mark.end <= handed; };
  // An iterator belongs to the training if it gives batches in several steps. One of an evaluation does not.
  std::set<std::int64_t> elsewhere, gave;
  for (const Mark& mark : marks_)
    if (mark.gives && !in_step(mark)) elsewhere.insert(mark.iterator);
  Spans loader;
  Time asked = handed, came = begin;  // the first request for a batch, and the arrival of the last batch
  bool mixed = false;                 // whether forward and backward passes take turns
  for (const Mark& mark : marks_) {
    if (!in_step(mark) || elsewhere.count(mark.iterator) == 0) continue;
    asked = std::min(asked, std::max(mark.begin, begin));
    came = std::max(came, mark.end);
    loader.Add(mark.begin, mark.end);
    if (mark.gives) mixed = !gave.insert(mark.iterator).second || mixed;
  }
  // If something was handed over before a batch was asked for, the batch may be one of a later step.
  if (gave.empty() || handed_.FirstBegin(begin + Time(1), handed) < asked) return {};
  const Time first = handed_.FirstBegin(came, handed);
  // The optimizer's step belongs before the batch. If one ends behind the gradients, the time from there to `handed`
  // led to another arrival, such as that of a metric, unless another optimizer's step follows.
  Time optimized = begin, ends = handed;
  bool optimizes_later = false;
  for (const Mark& mark : marks_) {
    if (mark.iterator != Mark::kOptimizer || mark.end <= begin) continue;
    if (mark.end <= asked) {
      optimized = mark.end;
    } else if (mark.end <= handed) {
      optimizes_later = true;
      if (mark.end > first) ends = mark.end;
      mixed = mixed || mark.end <= first;
    }
  }
  const auto next = std::find_if(marks_.begin(), marks_.end(), [&](const Mark& mark) { return mark.end > handed; });
  if (next != marks_.end() && next->iterator == Mark::kOptimizer) ends = handed;
  const auto computed = [&](Time from, Time to) {
    const Time away = blocked_.Within(from, to) + loader.Within(from, to) - loader.WithinBoth(from, to, blocked_);
    return ToSeconds(to - from - away);
  };
  Parts parts;
  parts[Part::kLoader] = ToSeconds(loader.Within(begin, handed) - loader.WithinBoth(begin, handed, blocked_));
  if (optimized > begin || (optimizes_ && !optimizes_later)) parts[Part::kOptimizer] = computed(begin, optimized);
  parts[Part::kOther] = computed(optimized, asked) + computed(ends, handed);
  if (!mixed) parts[Part::kForward] = computed(asked, first);
  parts[Part::kBackward] = computed(mixed ? asked : first, ends);
  return parts;
}

void StepTimer::PassOnBut(std::size_t kept) {
  for (; rows_.size() > kept && rows_.front().outstanding.empty(); rows_.pop_front()) {
    Step step = rows_.front();
    // A joined rank hands over no tensors, but Horovod's own reductions run on it. They count as no step of this rank.
    const bool joined = step.bucket < 0 && step.handed <= *step.begin;
    const Time begin = std::min(*step.begin, step.handed);
    // An update's next micro-batch may begin before this result comes. Later reductions count for that micro-batch.
    const Time until = rows_.size() > 1 ? std::min(step.result, *rows_[1].begin) : step.result;
    step.blocked = blocked_.Within(begin, step.handed);
    step.reduced = blocked_.WithinBoth(begin, step.handed, reductions_) + reductions_.Within(step.handed, until);
    step.begin = begin;
    if (!std::exchange(follows_, !joined)) step.begin.reset();
    if (step.begin) step.parts = PartsOf(begin, step.handed);
    while (!marks_.empty() && marks_.front().end <= last_handed_) marks_.pop_front();
    last_handed_ = std::max(last_handed_, step.handed);
    if (joined) continue;
    pass_on_(step);
    if (!step.begin || step.handed == begin || report_.ended.size() == kMost) continue;
    report_.ended.push_back({step.number, ToSeconds(step.handed - begin - step.blocked), step.parts});
    report_.seconds += ToSeconds((rows_.size() > 1 ? *rows_[1].begin : std::max(step.result, step.handed)) - begin);
  }
}

void StepRows::Add(Rank rank, const std::vector<TimedStep>& steps) {
  if (steps.empty()) return;
  RankSteps& member = ranks_[Index(rank)];
  member.has_begun = true;
  if (std::exchange(member.was_out, false) && member.steps.empty())
    member.left_out = std::min(member.left_out, steps.front().number - row_);
  member.steps.insert(member.steps.end(), steps.begin(), steps.end());
  while (member.steps.size() > kMostAhead) {
    const std::int64_t first = member.steps.front().number;
    member.steps.pop_front();
    member.left_out += member.steps.front().number - first;
  }
}

void StepRows::SetOut(Rank rank, bool out) {
  RankSteps& member = ranks_[Index(rank)];
  member.out = out;
  if (out) member.was_out = true;
}

std::vector<StepRows::Row> StepRows::Take(std::size_t most) {
  std::vector<Row> rows;
  const auto has_begun = [](const RankSteps& member) { return member.has_begun; };
  if (takes_ < kPatience && std::any_of(ranks_.begin(), ranks_.end(), has_begun)) ++takes_;
  const bool waits_for_all = takes_ < kPatience;
  const auto holds_up = [waits_for_all](const RankSteps& member) {
    return member.steps.empty() && !member.out && (member.has_begun || waits_for_all);
  };
  while (rows.size() < most && std::none_of(ranks_.begin(), ranks_.end(), holds_up)) {
    std::optional<std::int64_t> number;
    for (const RankSteps& member : ranks_)
      if (!member.steps.empty()) number = std::min(number.value_or(member.next()), member.next());
    if (!number) break;
    Row row{std::vector<double>(ranks_.size(), std::numeric_limits<double>::quiet_NaN()),
            std::vector<Parts>(ranks_.size())};
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      RankSteps& member = ranks_[rank];
      if (member.steps.empty() || member.next() != *number) continue;
      row.seconds[rank] = member.steps.front().seconds;
      row.parts[rank] = member.steps.front().parts;
      member.steps.pop_front();
    }
    rows.push_back(std::move(row));
    row_ = *number + 1;
  }
  return rows;
}

}  // namespace horovod_partial
