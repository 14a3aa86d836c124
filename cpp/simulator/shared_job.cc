#include "simulator/shared_job.h"

#include <algorithm>
#include <stdexcept>

#include "simulator/clock.h"

namespace horovod_partial {

SharedJob::SharedJob(SharedJobConfig config)
    : config_(std::move(config)),
      // Cycles must have different times: a micro-batch that is taken back from a rank is free only in a later cycle.
      cycle_(std::max(FromSeconds(config_.cycle), Time(1))),
      ledger_(config_.ranks, config_.ranks * config_.passes) {
  for (Rank rank = 0; rank < config_.ranks; ++rank) workers_.push_back({OwnShare(rank, config_.passes)});
}

SharedJobResult SharedJob::Run() {
  SharedJobResult result;
  for (; update_ < config_.updates; ++update_) {
    start_ = now_;
    negotiated_ = start_ - cycle_;
    for (Rank rank = 0; rank < config_.ranks; ++rank) {
      At(rank).share.Advance();
      At(rank).done = 0;
      Begin(rank);
    }
    for (int left = config_.ranks * config_.passes; left > 0;) {
      const Time negotiation = NextNegotiation();
      if (ends_.empty() && negotiation == kNever) throw std::logic_error("no rank gets the next micro-batch");
      // If a cycle begins at the moment when a micro-batch ends, the end is simulated first, and the cycle knows of it.
      if (ends_.empty() || negotiation < ends_.top().first) {
        now_ = negotiation;
        Negotiate();
      } else {
        Finish();
        --left;
      }
    }
    Observe();
    now_ = Reduced();
    ledger_.Advance();
    result.ends.push_back(ToSeconds(now_));
    for (const Worker& worker : workers_) result.made.push_back(worker.done);
    result.bounds.push_back(ListSchedule());
  }
  return result;
}

void SharedJob::Begin(Rank rank) {
  Worker& worker = At(rank);
  worker.computes = worker.share.MayBegin();
  if (!worker.computes) return;
  const std::size_t row = Cell(rank, config_.ranks);
  const double delay = (worker.done == 0 ? config_.in_first[row] : 0) + config_.in_each[row] +
                       config_.in_own[Cell(worker.share.next(), config_.ranks * config_.passes)];
  worker.share.Begin(now_);
  ends_.emplace(now_ + FromSeconds(config_.compute + delay), rank);
}

void SharedJob::Finish() {
  const Rank rank = ends_.top().second;
  now_ = ends_.top().first;
  ends_.pop();
  ++At(rank).done;
  At(rank).share.End(now_);
  if (!At(rank).share.MayBegin()) wanted_ = std::min(wanted_, now_);
  Begin(rank);
}

Time SharedJob::NextNegotiation() const {
  const Time wanted = std::min(wanted_, ledger_.NextDeadline());
  if (wanted == kNever) return kNever;
  return NegotiatedAt(start_, std::max({wanted, now_, negotiated_ + cycle_}), cycle_);
}

void SharedJob::Observe() {
  for (Rank rank = 0; rank < config_.ranks; ++rank) {
    const Worker& worker = At(rank);
    ledger_.Observe(rank, worker.share.share(now_, !worker.computes), worker.done, now_);
  }
}

void SharedJob::Negotiate() {
  negotiated_ = now_;
  Observe();
  const auto granted = ledger_.Decide(std::vector<bool>(workers_.size(), true), now_);
  for (std::size_t i = 0; i < granted.size(); ++i) {
    workers_[i].share.Hear(granted[i]);
    if (!workers_[i].computes) Begin(static_cast<Rank>(i));
  }
  wanted_ = granted.empty() ? kNever : now_;  // ranks report again, because the grants have changed
}

// Returns when the update is reduced if its last micro-batch ends now. The next update begins only after this time.
Time SharedJob::Reduced() const {
  Time negotiated = start_ - cycle_;
  Time free = start_;
  for (const Gradient& message : config_.messages) {
    const Time ready = now_ - FromSeconds(config_.compute - message.ready);
    if (ready > negotiated) negotiated = NegotiatedAt(std::max(free, negotiated + cycle_), ready, cycle_);
    free = std::max(free, negotiated) + FromSeconds(config_.cost(message.bytes));
  }
  return std::max(free, now_);
}

double SharedJob::ListSchedule() const {
  const int micro_batches = config_.ranks * config_.passes;
  const auto first = config_.in_own.begin() + static_cast<std::ptrdiff_t>(Cell(0, micro_batches));
  std::vector<double> own(first, first + micro_batches);
  std::sort(own.begin(), own.end(), std::greater<>());
  const auto pace = [this](Rank rank) { return config_.compute + config_.in_each[Cell(rank, config_.ranks)]; };
  using Free = std::pair<double, Rank>;  // when a rank could end one more micro-batch, and the rank
  std::priority_queue<Free, std::vector<Free>, std::greater<>> ranks;
  for (Rank rank = 0; rank < config_.ranks; ++rank)
    ranks.emplace(config_.in_first[Cell(rank, config_.ranks)] + pace(rank), rank);
  double last = 0;
  for (const double more : own) {
    const auto [time, rank] = ranks.top();
    ranks.pop();
    last = std::max(last, time + more);
    ranks.emplace(time + more + pace(rank), rank);
  }
  return last;
}

}  // namespace horovod_partial
