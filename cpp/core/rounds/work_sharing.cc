#include "core/rounds/work_sharing.h"

#include <algorithm>
#include <utility>

namespace horovod_partial {
namespace {

// The least time from one decision to the next, if no rank has news.
constexpr Time kLookAgain = std::chrono::milliseconds(1);

// No micro-batch counts as moving for longer than this.
constexpr Time kLongestLatency = std::chrono::seconds(1);

// The time of a micro-batch counts as at most this multiple of the rank's usual time, and the usual time as at most
// this multiple of it. Otherwise a pause, for example an evaluation in the middle of a micro-batch, would make the rank
// seem slow.
constexpr int kMostTimes = 3;

// After an update this part of the latency is forgotten. A latency that was too long moves nothing, so it would not be
// measured again.
constexpr int kForgotten = 16;

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
  begun_ = ended_ = 0;
  computed_ = Time(0);
  for (int i = 0; i < each_; ++i) granted_.push_back(first_ + i);
}

Ledger::Ledger(int size, int micro_batches)
    : each_(micro_batches / size),
      ranks_(static_cast<std::size_t>(size)),
      taken_(static_cast<std::size_t>(micro_batches)),
      left_(static_cast<std::size_t>(size)) {
  Advance();
}

void Ledger::Observe(Rank rank, const Share& share, int done, Time now) {
  State& state = ranks_[Index(rank)];
  const Time since = now - share.age;
  const Time computed = share.computed - state.computed;
  if (done > state.done) {
    const Time took = std::max(computed / (done - state.done), Time(1));
    const Time usual = state.pace == Time(0) ? took : std::min(state.pace, kMostTimes * took);
    state.pace = (usual + std::min(took, kMostTimes * usual)) / 2;
  }
  if (share.begun > 0) started_ = std::min(started_, since - share.computed);
  while (state.held() > share.granted) {
    Mark(state.granted.back(), false);
    state.granted.pop_back();
  }
  state.begun = share.begun;
  state.done = done;
  state.wants = share.wants;
  state.gone = share.gone;
  state.computed = share.computed;
  state.since = since;
}

void Ledger::Advance() {
  std::fill(taken_.begin(), taken_.end(), false);
  std::fill(left_.begin(), left_.end(), each_);
  free_ = static_cast<int>(taken_.size());
  latency_ -= latency_ / kForgotten;
  looks_ahead_ = std::exchange(moves_, false);
  started_ = kNever;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    State& state = ranks_[i];
    state.granted.clear();
    state.begun = state.done = 0;
    state.wants = state.was_away = false;
    state.computed = Time(0);
    state.asked = kNever;
    while (state.held() < each_) Grant(i);
  }
}

void Ledger::Mark(int micro_batch, bool taken) {
  taken_[static_cast<std::size_t>(micro_batch)] = taken;
  left_[static_cast<std::size_t>(micro_batch / each_)] += taken ? -1 : 1;
  free_ += taken ? -1 : 1;
}

// Gives a rank the next of its own micro-batches. If it has none left, it gets the last micro-batch of the rank that
// has most left, because that rank would begin this micro-batch last.
void Ledger::Grant(std::size_t rank) {
  const auto each = static_cast<std::size_t>(each_);
  const std::size_t most = static_cast<std::size_t>(std::max_element(left_.begin(), left_.end()) - left_.begin());
  const std::size_t from = left_[rank] > 0 ? rank : most;
  std::size_t found = from * each + (from == rank ? 0 : each - 1);
  while (taken_[found]) found = from == rank ? found + 1 : found - 1;
  Mark(static_cast<int>(found), true);
  ranks_[rank].granted.push_back(static_cast<int>(found));
}

// Returns since when a rank does what it does now. A rank that has begun no micro-batch counts as late only when
// another rank has begun one. Before, all ranks may take the result of the update before.
Time Ledger::Since(const State& state, Time now) const {
  return state.begun > 0 ? state.since : std::min(started_, now);
}

// Returns when a rank is due to be free, by its pace alone.
Time Ledger::Due(const State& state, Time pace, Time now) const {
  return Since(state, now) + std::max(state.begun - state.done, 0) * pace;
}

// Returns when a rank will be free again. An overdue rank is expected to need as long again as it is overdue. So is a
// rank that could begin a micro-batch and does not: it may evaluate, or save a checkpoint.
Time Ledger::FreeAt(const State& state, Time pace, Time now) const {
  if (state.wants && state.idle()) return now;
  const Time due = Due(state, pace, now);
  return std::max(due, now + (now - due));
}

Ledger::Plan Ledger::PlanAt(const std::vector<bool>& comes, Time now) const {
  const std::size_t size = ranks_.size();
  Time known(0);
  int paces = 0;
  for (const State& state : ranks_) {
    known += state.pace;
    paces += state.pace > Time(0) ? 1 : 0;
  }
  const Time mean = paces > 0 ? known / paces : Time(1);
  Plan plan{std::vector<int>(size), std::vector<int>(size), std::vector<Time>(size), std::vector<Time>(size, kNever)};
  for (std::size_t i = 0; i < size; ++i) {
    const State& state = ranks_[i];
    plan.wanted[i] = state.held();
    plan.keeps[i] = state.begun;
    plan.pace[i] = state.pace > Time(0) ? state.pace : mean;
    if (!comes[i] || state.gone) continue;
    plan.end[i] = FreeAt(state, plan.pace[i], now) + state.unbegun() * plan.pace[i];
    // A rank keeps its first micro-batch, unless it is late. Otherwise nobody would see that a slow rank is fast again.
    if (state.begun == 0 && now - Since(state, now) <= plan.pace[i]) plan.keeps[i] = 1;
  }
  // A rank that comes back late from a flush may have lost all that it held. It gets a first one again, whether that
  // pays or not, because all other ranks may wait until it may begin one.
  const auto needs_one = [&](std::size_t i) { return ranks_[i].was_away && plan.wanted[i] < plan.keeps[i]; };
  // List scheduling: what is free goes to the rank that would end it first. Then the last micro-batch of the rank that
  // would end last moves to this rank too, while that pays although moving takes time.
  for (int free = free_;; --free) {
    const Time arrives = free > 0 ? now : now + 2 * latency_;
    const auto one_more = [&](std::size_t i) { return std::max(plan.end[i], arrives) + plan.pace[i]; };
    std::size_t to = size;
    std::size_t from = size;
    for (std::size_t i = 0; i < size; ++i) {
      if (plan.wanted[i] > plan.keeps[i] && (from == size || plan.end[i] > plan.end[from])) from = i;
      if (plan.end[i] == kNever) continue;
      if (to == size || needs_one(i) || (!needs_one(to) && one_more(i) < one_more(to))) to = i;
    }
    if (to == size) return plan;
    const bool pays = from < size && (needs_one(to) || plan.end[from] > one_more(to));
    if (free <= 0 && !pays) return plan;
    plan.end[to] = one_more(to);
    ++plan.wanted[to];
    if (free > 0) continue;
    --plan.wanted[from];
    if (plan.end[from] != kNever) plan.end[from] -= plan.pace[from];
  }
}

Time Ledger::NextMove(const Plan& plan, Time now) const {
  Time least = kNever;  // how long a micro-batch takes to move to the fastest idle rank, and there
  Time next = kNever;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (plan.end[i] == kNever) continue;
    if (ranks_[i].idle()) least = std::min(least, 2 * latency_ + plan.pace[i]);
    // What a rank gets while it makes its last micro-batch, it begins without a wait.
    if (looks_ahead_ && started_ != kNever && ranks_[i].unbegun() > 0)
      next = std::min(next, plan.end[i] - plan.pace[i]);
  }
  for (std::size_t i = 0; i < ranks_.size() && least != kNever; ++i) {
    const State& state = ranks_[i];
    // After `due`, the end of all that the rank holds is expected to come later by twice the time that passes.
    const Time due = Due(state, plan.pace[i], now);
    if (state.held() > plan.keeps[i])
      next = std::min(next, std::max(due, due + least - state.unbegun() * plan.pace[i]));
    if (plan.keeps[i] > state.begun) next = std::min(next, due + plan.pace[i]);  // then the rank may lose its first
  }
  return next == kNever ? kNever : std::max(next, now + kLookAgain);
}

std::vector<MicroBatches> Ledger::Tell(const std::vector<int>& wanted, Time now) {
  for (const bool idle : {true, false})  // idle ranks are served first
    for (std::size_t i = 0; i < ranks_.size(); ++i)
      while ((ranks_[i].idle() || !idle) && wanted[i] > ranks_[i].held() && free_ > 0) {
        Grant(i);
        moves_ = true;
        if (const Time asked = std::exchange(ranks_[i].asked, kNever); asked != kNever)
          latency_ = (latency_ + std::min(now - asked, kLongestLatency)) / 2;
      }
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    State& state = ranks_[i];
    state.asked = wanted[i] > state.held() ? std::min(state.asked, now) : kNever;
  }
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
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    before.push_back(ranks_[i].granted);
    ranks_[i].was_away = ranks_[i].was_away || !comes[i];
  }
  const Plan plan = PlanAt(comes, now);
  std::vector<MicroBatches> told = Tell(plan.wanted, now);
  deadline_ = NextMove(plan, now);
  return told == before ? std::vector<MicroBatches>() : told;
}

}  // namespace horovod_partial
