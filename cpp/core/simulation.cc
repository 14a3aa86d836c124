#include "core/simulation.h"

#include <stdexcept>
#include <utility>

namespace horovod_partial {

Simulation::Simulation(int size, Policy policy, Missed missed)
    : size_(size),
      policy_(std::move(policy)),
      missed_(missed),
      coordinator_(size),
      joined_(Index(size), false),
      ranks_(Index(size)) {}

Simulation::Local& Simulation::Find(Rank rank, const std::string& bucket) {
  Local& local = ranks_.at(Index(rank)).buckets[bucket];
  if (local.bucket == nullptr) {
    BucketOptions options;
    options.type = DataType::kFloat64;
    options.elements = 1;
    options.missed = missed_;
    local.bucket = std::make_unique<Bucket>(bucket, options);
  }
  return local;
}

std::vector<double> Simulation::Take(Local& local) {
  double result = 0;
  if (missed_ != Missed::kReplay) {
    local.bucket->TakeMissed(&result);
    return {result};
  }
  std::vector<double> results;
  while (local.bucket->untaken() > 0)
    if (local.bucket->TakeRounds(local.bucket->oldest_rounds(), &result) > 0) results.push_back(result);
  return results;
}

Simulation::Arrival Simulation::Arrive(Rank rank, const std::string& bucket, double value) {
  Local& local = Find(rank, bucket);
  if (local.waiting) return {Bucket::Arrived::kBusy, {}};
  local.value = value;
  const Bucket::Arrived outcome = local.bucket->Arrive({&local.value, &local.value, 1});
  if (outcome == Bucket::Arrived::kLate) return {outcome, Take(local)};
  local.waiting = outcome != Bucket::Arrived::kBusy;
  return {outcome, {}};
}

std::vector<Closing> Simulation::Cycle(Time now) {
  for (Rank rank = 0; rank < size_; ++rank) {
    Report report;
    RankState& state = ranks_[Index(rank)];
    report.absent.all = state.blocked || state.flush != Report::Flush::kNone;
    report.flush = state.flush;
    for (auto& [name, local] : state.buckets) {
      if (local.bucket->state() == Bucket::State::kRunning)
        throw std::logic_error("round " + std::to_string(local.bucket->last().round) + " of " + name +
                               " has not been finished on rank " + std::to_string(rank));
      Report::Item item;
      item.bucket = name;
      const bool sent = local.bucket->state() == Bucket::State::kArrived && !local.bucket->reported();
      if (sent) {
        item.gradients = local.bucket->ReportArrival();
        item.full = local.bucket->wants_full_round();
        if (!local.bucket->declared()) item.declaration = Declaration{policy_, DataType::kFloat64, {1}};
      } else {
        item.kind = Report::Item::Kind::kPending;
        item.gradients = local.bucket->ReportPending();
        item.late = local.bucket->ReportLate();
        if (local.bucket->full()) item.backlog = Report::Backlog::kFull;
        if (item.gradients == 0 && item.backlog == Report::Backlog::kNone) continue;
      }
      report.items.push_back(std::move(item));
    }
    coordinator_.Observe(rank, report, now);
  }
  coordinator_.SetJoined(joined_);

  auto closings = coordinator_.Decide(now);
  for (const auto& closing : closings) {
    double sum = 0;
    std::vector<double*> outputs;
    for (Rank rank = 0; rank < size_; ++rank) {
      if (joined_[Index(rank)]) continue;
      const Bucket::Entry entry = Find(rank, closing.bucket).bucket->Begin(closing, rank);
      sum += *static_cast<const double*>(entry.input);
      outputs.push_back(static_cast<double*>(entry.output));
    }
    for (double* output : outputs) *output = sum;
    if (closing.reason == Closing::Reason::kFlush || closing.reason == Closing::Reason::kEnd)
      for (auto& state : ranks_) state.flush = Report::Flush::kNone;
  }
  return closings;
}

std::vector<double> Simulation::Finish(Rank rank, const std::string& bucket) {
  Local& local = Find(rank, bucket);
  const bool on_time = local.bucket->Finish();
  if (!std::exchange(local.waiting, false)) return {};
  return on_time && missed_ != Missed::kReplay ? std::vector<double>{local.value} : Take(local);
}

std::vector<double> Simulation::Collect(Rank rank, const std::string& bucket) {
  Local& local = Find(rank, bucket);
  return local.bucket->HasMissed() ? Take(local) : std::vector<double>();
}

}  // namespace horovod_partial
