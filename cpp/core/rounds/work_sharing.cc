#include "core/rounds/work_sharing.h"

#include <algorithm>

namespace horovod_partial {
namespace {

// A rank may wait while other ranks hold micro-batches that they have not begun. As time passes, it may become better
// to move such a micro-batch to the waiting rank. So Decide runs again after this time.
constexpr Time kLookAgain = std::chrono::milliseconds(1);

// A time counts as at most this multiple of the usual time. Otherwise a pause, for example an
// evaluation in the middle of a micro-batch, would make the rank seem slow.
constexpr int kMostTimes = 3;

// After an update this part of the latency is forgotten. A latency that was too long moves nothing, so it would not be
// measured again.
constexpr int kForgotten = 16;

// Adds a time to a moving average, in which it counts half.
void Learn(Time& mean, Time took) { mean = mean == Time(0) ? took : (mean + std::min(took, kMostTimes * mean)) / 2; }

}  // namespace

OwnShare::OwnShare(Rank rank, int each) : first_(rank * each), each_(each) { Advance(); }

bool OwnShare::Hear(const MicroBatches& granted) {
  const bool fewer = granted.size() < granted_.size();
  if (granted.size() < begun_)
    Leave();
  else
    granted_ = granted;
  return fewer;
}

void OwnShare::Advance() {
  granted_.clear();
  begun_ = 0;
  for (int i = 0; i < each_; ++i) granted_.push_back(first_ + i);
}

Ledger::Ledger(int size, int micro_batches)
    : each_(micro_batches / size),
      ranks_(static_cast<std::size_t>(size)),
      taken_(static_cast<std::size_t>(micro_batches)) {
  Advance(Time(0));
}

void Ledger::Observe(Rank rank, const Share& share, int done, Time ended, Time now) {
  State& state = ranks_[Index(rank)];
  // Before the first micro-batch begins, all ranks wait for the update before. So no rank is late yet.
  if (share.begun > 0 && done == 0 && !IsUnderWay())
    for (State& each : ranks_) each.since = now;
  // A report tells of a begin later than it was, maybe after the end. Such a time is not learned.
  if (done > state.done && ended > state.since) Learn(state.pace, (ended - state.since) / (done - state.done));
  if (share.begun > state.begun && state.asked != kNever) Learn(latency_, now - state.asked);
  if (share.begun > state.begun) state.asked = kNever;
  if (share.begun != state.begun) state.since = now;
  if (done > state.done) state.since = ended;
  while (state.held() > share.granted) {
    taken_[static_cast<std::size_t>(state.granted.back())] = false;
    state.granted.pop_back();
  }
  state.begun = share.begun;
  state.done = done;
  state.wants = share.wants;
  state.gone = share.gone;
}

void Ledger::Advance(Time now) {
  std::fill(taken_.begin(), taken_.end(), false);
  latency_ -= latency_ / kForgotten;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    State& state = ranks_[i];
    state.granted.clear();
    state.begun = state.done = 0;
    state.wants = false;
    state.since = now;
    state.asked = kNever;
    while (state.held() < each_) Grant(i);
  }
}

bool Ledger::IsUnderWay() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const State& state) { return state.begun > 0; });
}

int Ledger::Free() const { return static_cast<int>(std::count(taken_.begin(), taken_.end(), false)); }

// Gives a rank the next of its own micro-batches. If it has none left, it gets the last micro-batch of the rank that
// has most left, because that rank would begin this micro-batch last.
void Ledger::Grant(std::size_t rank) {
  const auto each = static_cast<std::size_t>(each_);
  const auto left = [&](std::size_t of) {
    const auto first = taken_.begin() + static_cast<std::ptrdiff_t>(of * each);
    return std::count(first, first + each_, false);
  };
  std::size_t from = rank;
  for (std::size_t other = 0; left(rank) == 0 && other < ranks_.size(); ++other)
    if (left(other) > left(from)) from = other;
  std::size_t found = from * each + (from == rank ? 0 : each - 1);
  while (taken_[found]) found = from == rank ? found + 1 : found - 1;
  taken_[found] = true;
  ranks_[rank].granted.push_back(static_cast<int>(found));
}

// Returns when a rank will be free again. An overdue rank is expected to need as long again as it is overdue.
Time Ledger::FreeAt(const State& state, Time pace, Time now) {
  if (state.wants) return now;
  const Time expected = state.since + (state.begun > state.done ? pace : Time(0));
  return std::max(expected, now + (now - expected));
}

std::vector<int> Ledger::Wanted(const std::vector<bool>& comes, Time now) const {
  const std::size_t size = ranks_.size();
  Time known(0);
  int paces = 0;
  for (const State& state : ranks_) {
    known += state.pace;
    paces += state.pace > Time(0) ? 1 : 0;
  }
  const bool under_way = IsUnderWay();
  const Time mean = paces > 0 ? known / paces : Time(1);
  std::vector<int> wanted(size);
  std::vector<int> keeps(size);
  std::vector<Time> pace(size);
  std::vector<Time> end(size);  // when the rank would end all that it should hold; kNever if it begins none
  for (std::size_t i = 0; i < size; ++i) {
    const State& state = ranks_[i];
    wanted[i] = state.held();
    keeps[i] = state.begun;
    pace[i] = state.pace > Time(0) ? state.pace : mean;
    end[i] = kNever;
    if (!comes[i] || state.gone) continue;
    end[i] = FreeAt(state, pace[i], now) + (state.held() - state.begun) * pace[i];
    // A rank keeps its first micro-batch, unless it is late. Otherwise nobody would see that a slow rank is fast again.
    if (state.begun == 0 && !(under_way && now - state.since > pace[i])) keeps[i] = 1;
  }
  // List scheduling: what is free goes to the rank that would end it first. Then the last micro-batch of the rank that
  // would end last moves to this rank too, while that pays although moving takes time.
  for (int free = Free();; --free) {
    const Time arrives = free > 0 ? now : now + latency_;
    const auto one_more = [&](std::size_t i) { return std::max(end[i], arrives) + pace[i]; };
    std::size_t to = size;
    std::size_t from = size;
    for (std::size_t i = 0; i < size; ++i) {
      if (end[i] != kNever && (to == size || one_more(i) < one_more(to))) to = i;
      if (wanted[i] > keeps[i] && (from == size || end[i] > end[from])) from = i;
    }
    if (to == size || (free <= 0 && (from == size || end[from] <= one_more(to)))) return wanted;
    end[to] = one_more(to);
    ++wanted[to];
    if (free > 0) continue;
    --wanted[from];
    if (end[from] != kNever) end[from] -= pace[from];
  }
}

std::vector<MicroBatches> Ledger::Tell(const std::vector<int>& wanted) {
  for (const bool waits : {true, false})  // ranks that wait for a micro-batch are served first
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      while (ranks_[i].wants == waits && wanted[i] > ranks_[i].held() && Free() > 0) Grant(i);
  std::vector<MicroBatches> told;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const auto kept = static_cast<std::size_t>(std::max(wanted[i], ranks_[i].begun));
    told.push_back(ranks_[i].granted);
    if (kept < told[i].size()) told[i].resize(kept);
  }
  return told;
}

std::vector<MicroBatches> Ledger::Decide(const std::vector<bool>& comes, Time now) {
  std::vector<MicroBatches> before;
  for (const State& state : ranks_) before.push_back(state.granted);
  const std::vector<int> wanted = Wanted(comes, now);
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    State& state = ranks_[i];
    const bool waits = state.wants && wanted[i] > state.begun && (state.asked != kNever || state.held() == state.begun);
    state.asked = waits ? std::min(state.asked, now) : kNever;
  }
  std::vector<MicroBatches> told = Tell(wanted);
  bool waits = false;
  bool held = false;
  for (const State& state : ranks_) {
    waits = waits || (state.wants && state.held() == state.begun);
    held = held || state.held() > state.begun;
  }
  deadline_ = waits && held ? now + kLookAgain : kNever;
  return told == before ? std::vector<MicroBatches>() : told;
}

}  // namespace horovod_partial
