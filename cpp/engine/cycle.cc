// What a rank does for one process set in a cycle of Horovod's background thread: it reports, begins the rounds that
// have closed, and ends the rounds that were reduced.
#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "engine/log.h"
#include "engine/shared_bucket.h"

namespace horovod_partial {
namespace {

// Returns true if this rank uses any bucket besides those in which ranks compare their models. If it returns false, the
// other ranks compare their models without this rank.
bool AnyTrains(const Buckets& buckets) {
  return std::any_of(buckets.begin(), buckets.end(), [](const auto& bucket) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    return bucket->Counts() > 0 && bucket->core.declared() && !bucket->Retired();
  });
}

}  // namespace

PossibleArrivals::Away Engine::Away(Time now, Time foreign_since) const {
  const Flush::Kind flush = flush_.waits_in();
  const PossibleArrivals::Foreign foreign{foreign_since, waits_are_told_};
  PossibleArrivals::Away away =
      surroundings_.arrivals->Look(this, now, foreign, flush != Flush::Kind::kNone, thresholds_);
  // While a device still computes a micro-batch, this rank comes to its buckets, whichever threads wait.
  if (surroundings_.shares_work && surroundings_.awaited > 0) {
    away.waiting = {};
    away.blocked = false;
  }
  // Other ranks must not wait for a rank that has ended, even if some of its threads still contribute.
  if (flush == Flush::Kind::kEnding) away.absent = {true, {}};
  return away;
}

// Finds the contributions that a device has computed by now. For each of them this rank arrives.
void Engine::ArriveWhatIsReady() {
  if (surroundings_.awaited == 0) return;
  for (const auto& bucket : buckets_.All()) {
    BucketLock lock(bucket->mutex);
    const bool any = bucket->ArriveWithWhatIsReady(lock);
    if (any && surroundings_.shares_work) surroundings_.changes.Tell();  // a thread may wait for its next micro-batch
  }
}

// Ends all waits of this process set if rank 0 has found a deadlock: the ranks wait for each other, maybe in several
// process sets. The buckets fail for good, because the ranks may hear of the deadlock in different cycles.
void Engine::EndIfDeadlocked() {
  const std::uint64_t deadlocks = surroundings_.first_failure->deadlocks();
  if (std::exchange(deadlocks_, deadlocks) == deadlocks) return;
  const std::string why = surroundings_.first_failure->LastDeadlock();
  for (const auto& bucket : buckets_.All()) {
    BucketLock lock(bucket->mutex);
    bucket->Fail(why, lock);
  }
  flush_.Refuse(why);
}

bool Engine::WantsCycle(Time now, Time foreign_since) {
  EndIfDeadlocked();
  ArriveWhatIsReady();
  if (surroundings_.news || Owner::Departures() != departures_) return true;
  // This function runs in each cycle of Horovod, a thousand times a second, and returns early if nothing has happened.
  const bool same = looked_.events == surroundings_.arrivals->events() && foreign_since == looked_foreign_;
  if (same && now <= looked_.until) return false;
  looked_ = Away(now, foreign_since);
  looked_foreign_ = foreign_since;
  return !(looked_ == reported_);
}

Report Engine::BuildReport(Time now, Time foreign_since, bool joined) {
  EndIfDeadlocked();
  ArriveWhatIsReady();  // WantsCycle calls this too, but a report may be built without a call of WantsCycle
  surroundings_.news = false;
  surroundings_.reported = now;
  if (const std::uint64_t departures = Owner::Departures(); std::exchange(departures_, departures) != departures)
    buckets_.ForgetOwnersThatLeft();
  Report report;
  report.failure = farewell_.TakeUnsaid();
  // Reads first which threads wait, and then the arrivals. Otherwise, if a thread arrived in between and waited, the
  // report would say that the thread waits, and would lack its arrival.
  reported_ = looked_ = Away(now, foreign_since);
  looked_foreign_ = foreign_since;
  report.absent = reported_.absent;
  report.waiting = reported_.waiting;
  report.blocked = reported_.blocked;
  report.elsewhere = reported_.elsewhere;
  report.leaves = sharing_.ReportLeaves();
  report.flush = flush_.ToReport();
  const Buckets buckets = buckets_.All();
  const bool trains = AnyTrains(buckets);
  for (const auto& bucket : buckets) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    auto item = ItemOf(*bucket, now, joined, trains, report.flush == Flush::Kind::kEnding);
    if (item) report.items.push_back(std::move(*item));
  }
  return report;
}

// Returns what this cycle's report says of a bucket, or nothing. Called with the bucket's lock held. `ends`: true if
// this rank will not train any more.
std::optional<Report::Item> Engine::ItemOf(SharedBucket& bucket, Time now, bool joined, bool trains, bool ends) {
  using Kind = Report::Item::Kind;
  Bucket& core = bucket.core;
  const bool retired = bucket.Retired() || (!trains && core.declared() && IsOfFlushes(core.name()));
  Report::Item item;
  item.bucket = core.name();
  if (retired && !core.declared()) {
    buckets_.Forget(bucket);  // no round of the bucket has closed, and no arrival waits for one
    return std::nullopt;
  }
  if (!bucket.poison.empty()) {
    item.kind = Kind::kRetired;
    return retired ? std::optional(item) : std::nullopt;
  }
  if (joined) core.LeaveOut(core.completed());
  item.age = std::max(now - bucket.arrived, Time(0));
  if (bucket.share) {
    const bool gone = bucket.OwnerIsGone();
    if (gone) bucket.share->GiveUp(bucket.Queued());
    if (core.declared()) {  // until its first round nobody else makes what this rank holds, even while it has joined
      if (joined) bucket.share->Leave();
      item.share = bucket.share->share(now, bucket.wants, gone);
    }
  }
  if (core.state() == Bucket::State::kRunning) {
    item.kind = Kind::kRunning;
    return item;
  }
  if (core.state() == Bucket::State::kArrived && joined) {
    core.Unreport();
    return std::nullopt;
  }
  if (core.state() == Bucket::State::kArrived && !core.reported()) {
    item.kind = Kind::kArrival;
    item.gradients = bucket.InMemory([&] { return core.ReportArrival(); });
    item.work = core.arrival().work;
    item.full = core.wants_full_round();
    if (!core.declared()) item.declaration = bucket.config.declaration();
    return item;
  }
  item.kind = retired ? Kind::kRetired : Kind::kPending;
  if (retired) {
    if (bucket.Unsettled()) buckets_.NoteUnsettled(core.name());
    core.DiscardMissed();
  }
  // A rank that will not train any more keeps its old model out of the averages of other ranks.
  const bool leaves = retired || ends;
  if (!leaves || core.options().late != Late::kKeep) {
    item.gradients = bucket.InMemory([&] { return core.ReportPending(); });
    item.late = core.ReportLate();
  }
  if (!retired && core.full()) item.backlog = bucket.draining > 0 ? Report::Backlog::kDraining : Report::Backlog::kFull;
  const bool says_nothing = item.gradients == 0 && item.backlog == Report::Backlog::kNone && !retired && !item.share;
  return says_nothing ? std::nullopt : std::optional(item);
}

void Engine::Begin(const std::vector<Closing>& closings, bool joined) {
  std::string lost;   // the error of a bucket that has failed after this rank used it; empty if there is none
  bool told = false;  // true if a thread of this rank waits for a failed bucket or in a flush, and so gets the error
  int flush_rounds = 0;
  Flush::Kind flush_over = Flush::Kind::kNone;
  for (const auto& closing : closings) {
    // If a closing has an error, it ends no flush, because the coordinator begins that flush again.
    const bool round = closing.error.empty() && !joined;
    if (round && closing.flush_over != Flush::Kind::kNone) flush_over = closing.flush_over;
    const auto bucket = buckets_.Find(closing.bucket);
    if (bucket == nullptr) {
      if (closing.bucket == Farewell::kBucket && !closing.error.empty())
        surroundings_.first_failure->Hear(closing.error);
      if (closing.bucket == FirstFailure::kDeadlock) {
        surroundings_.first_failure->HearOfDeadlock(closing.error);
        ++deadlocks_;  // EndIfDeadlocked has nothing more to do: this cycle's closings make all buckets in use fail
      }
      LogRefusal(closing.error);
      continue;
    }
    BucketLock lock(bucket->mutex);
    if (!closing.error.empty()) {
      if (bucket->operation == nullptr) LogRefusal(closing.error);
      told = told || bucket->operation != nullptr || flush_.waits_in() != Flush::Kind::kNone;
      if (bucket->core.declared() && !bucket->Retired()) lost = closing.error;
      Refuse(*bucket, closing.error, lock);
      continue;
    }
    if (bucket->share) {
      bucket->share->Advance();
      bucket->update = closing.round + 1;
      bucket->updates += closing.gradients() > 0 ? 1 : 0;
    }
    if (joined || !bucket->poison.empty()) {  // this rank submits nothing, so Horovod sends zeros for it
      if (joined) {
        bucket->core.LeaveOut(closing.round + 1);
        if (!closing.ends) bucket->ArriveWhileJoined(lock);
      }
      if (closing.ends) End(*bucket, lock);
      continue;
    }
    // This rank has reported no arrival at this bucket yet, and has seen no round of it. Horovod sends zeros for this
    // rank in this round. If the rank has arrived, its arrival waits for a later round.
    if (!bucket->core.declared() && !bucket->core.reported() && closing.Includes(rank())) continue;
    const bool first = !bucket->core.declared();
    const Bucket::Entry entry = bucket->InMemory([&] { return bucket->core.Begin(closing, rank()); });
    bucket->flush_round = closing.flushes && entry.member;
    if (closing.flushes && bucket->in_flush) bucket->flush_end = closing.round + 1;
    flush_rounds += bucket->flush_round ? 1 : 0;
    bucket->statistics.Record(closing);
    surroundings_.collectives.Place(bucket, bucket->core.name(), bucket->config, entry);
    if (entry.member) bucket->arrivals.SetOpen(false, Now());
    if (first && bucket->core.declared()) surroundings_.in_use += bucket->Counts();
    if (closing.ends && !entry.member) End(*bucket, lock);
  }
  if (!lost.empty() && !told) buckets_.NoteLoss(lost);
  flush_.BeginRounds(flush_rounds, flush_over);
  flush_.Release();
}

// Makes a bucket fail because the coordinator says so. This rank's arrival at the bucket fails, and every rank may use
// the bucket's name anew. A flush that waits fails too, because it cannot deliver late contributions to the bucket.
void Engine::Refuse(SharedBucket& bucket, const std::string& error, BucketLock& lock) {
  if (bucket.core.declared()) {
    surroundings_.in_use -= bucket.Counts();
    flush_.Refuse(error);
  }
  bucket.Fail(error, lock);
  buckets_.NoteRefusal(error);
  buckets_.Forget(bucket);
}

// Logs the error of a bucket for which no thread of this rank waits. This error may explain a wait elsewhere.
void Engine::LogRefusal(const std::string& error) {
  if (!error.empty() && std::exchange(logged_, error) != error) Log(LogLevel::kError, rank(), error);
}

void Engine::Finished(const std::shared_ptr<SharedBucket>& bucket, const std::string& error) {
  BucketLock lock(bucket->mutex);
  const bool ends = bucket->core.last().ends;
  std::string failure = error;
  try {
    if (failure.empty()) bucket->EndRound(lock);
  } catch (const std::exception& exception) {  // a device may fail, but Horovod's callback must not throw
    failure = bucket->WhyItFailed(exception);
  }
  if (!failure.empty()) bucket->Fail(failure, lock);
  if (ends) End(*bucket, lock);
  if (std::exchange(bucket->flush_round, false)) {
    flush_.EndRound(failure);
  } else if (bucket->draining > 0) {
    surroundings_.changes.Tell();
  }
  if (ends) flush_.Release();
}

// Forgets a bucket after its last round, which has delivered everything. A contribution that came after the coordinator
// ended the bucket begins a new bucket of the same name. If the owner is not gone, because this rank has joined or has
// not arrived yet, the bucket is as if just declared.
void Engine::End(SharedBucket& bucket, BucketLock& lock) {
  if (bucket.operation != nullptr && bucket.operation->arrival.input == nullptr) bucket.Complete(true, lock);
  if (bucket.core.declared()) surroundings_.in_use -= bucket.Counts();
  bucket.Reset();
  if (bucket.operation == nullptr) {
    if (bucket.owner == nullptr || bucket.OwnerIsGone()) buckets_.Forget(bucket);
  } else if (bucket.awaited.empty()) {
    bucket.ArriveOrFail(lock);
  }
}

void Engine::RecordGroups(const std::string& name, int made, std::chrono::nanoseconds setup) {
  const auto bucket = buckets_.Find(name);
  if (bucket == nullptr) return;
  std::lock_guard<std::mutex> lock(bucket->mutex);
  bucket->statistics.groups_made += made;
  bucket->statistics.setup_seconds += ToSeconds(setup);
}

}  // namespace horovod_partial
