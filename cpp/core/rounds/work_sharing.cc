#include "core/rounds/work_sharing.h"

#include <algorithm>

namespace horovod_partial {
namespace {

// A rank may wait while other ranks hold micro-batches that they have not begun. As time passes, it may become better
// to move such a micro-batch to the waiting rank. So Decide runs again after this time.
constexpr Time kLookAgain = std::chrono::milliseconds(1);

// The time of a micro-batch counts as at most this multiple of the rank's usual time. Otherwise a pause, for example an
// evaluation in the middle of a micro-batch, would make the rank seem slow.
constexpr int kMostTimes = 3;

}  // namespace

OwnShare::OwnShare(Rank rank, int each) : first_(rank * each) {
  for (int i = 0; i < each; ++i) granted_.push_back(first_ + i);
}

void OwnShare::Hear(const MicroBatches& granted) {
  if (granted.size() < begun_) return Leave();
  granted_ = granted;
}

void OwnShare::Advance() {
  granted_ = {first_};
  begun_ = 0;
}

Ledger::Ledger(int size, int micro_batches)
    : each_(micro_batches / size),
      ranks_(static_cast<std::size_t>(size)),
      taken_(static_cast<std::size_t>(micro_batches)) {
  Advance(Time(0));
}

void Ledger::Observe(Rank rank, const Share& share, int done, Time now) {
  State& state = ranks_[Index(rank)];
  if (done > state.done) {
    const Time took = (now - state.since) / (done - state.done);
    state.pace = state.pace == Time(0) ? took : (state.pace + std::min(took, kMostTimes * state.pace)) / 2;
  }
  if (done != state.done || share.begun != state.begun) state.since = now;
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
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    State& state = ranks_[i];
    state.granted.clear();
    state.begun = state.done = 0;
    state.wants = false;
    state.since = now;
    Grant(i);
  }
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
  std::vector<int> wanted(size);
  int left = static_cast<int>(taken_.size());
  Time known(0);
  int paces = 0;
  for (std::size_t i = 0; i < size; ++i) {
    wanted[i] = ranks_[i].begun;
    left -= ranks_[i].begun;
    known += ranks_[i].pace;
    paces += ranks_[i].pace > Time(0) ? 1 : 0;
  }
  const Time mean = paces > 0 ? known / paces : Time(1);
  std::vector<Time> pace(size);
  std::vector<Time> free_at(size);
  for (std::size_t i = 0; i < size; ++i) {
    pace[i] = ranks_[i].pace > Time(0) ? ranks_[i].pace : mean;
    free_at[i] = FreeAt(ranks_[i], pace[i], now);
  }
  // List scheduling: the next micro-batch goes to the rank that would end it first. Looking further than two
  // micro-batches for each rank would not change what the ranks should hold now.
  left = std::min(left, 2 * static_cast<int>(size));
  std::vector<bool> holds(size);
  for (; left > 0; --left) {
    std::size_t best = size;
    for (std::size_t i = 0; i < size; ++i)
      if (comes[i] && !ranks_[i].gone && (best == size || free_at[i] + pace[i] < free_at[best] + pace[best])) best = i;
    if (best == size) break;
    if (!holds[best]) ++wanted[best];
    holds[best] = true;
    free_at[best] += pace[best];
  }
  return wanted;
}

std::vector<MicroBatches> Ledger::Tell(const std::vector<int>& wanted) {
  for (const bool waits : {true, false})  // ranks that wait for a micro-batch are served first
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      if (ranks_[i].wants == waits && wanted[i] > ranks_[i].held() && Free() > 0) Grant(i);
  bool lacks = false;  // true if some rank should have a micro-batch that another rank holds
  std::vector<MicroBatches> told;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    lacks = lacks || wanted[i] > ranks_[i].held();
    told.push_back(ranks_[i].granted);
  }
  for (std::size_t i = 0; lacks && i < ranks_.size(); ++i) {
    const auto kept = static_cast<std::size_t>(std::max(wanted[i], ranks_[i].begun));
    if (kept < told[i].size()) told[i].resize(kept);
  }
  return told;
}

std::vector<MicroBatches> Ledger::Decide(const std::vector<bool>& comes, Time now) {
  std::vector<MicroBatches> before;
  for (const State& state : ranks_) before.push_back(state.granted);
  std::vector<MicroBatches> told = Tell(Wanted(comes, now));
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
