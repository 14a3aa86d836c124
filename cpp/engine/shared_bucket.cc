#include "engine/shared_bucket.h"

#include <algorithm>
#include <utility>

#include "engine/log.h"

namespace horovod_partial {
namespace {

constexpr std::chrono::seconds kDeadPatience(5);

// While a rank holds micro-batches that it has not begun, nobody waits for its report of those that it has made. But
// after this time without a report the other ranks should see that it makes progress.
constexpr std::chrono::seconds kLongestSilence(1);

}  // namespace

SharedBucket::SharedBucket(Surroundings& the_surroundings, const std::string& name, BucketConfig bucket_config)
    : surroundings(the_surroundings),
      config(std::move(bucket_config)),
      core(name, config.options()),
      arrivals(surroundings.arrivals, surroundings.engine, name) {
  Reset();
}

void SharedBucket::Reset() {
  core = Bucket(core.name(), core.options());
  statistics = {};
  const Policy& policy = config.spec.policy;
  if (!policy.grants) return;
  share.emplace(surroundings.rank, policy.micro_batches / surroundings.size);
  update = 0;
  holds_more = false;
  surroundings.shares_work = true;
}

bool SharedBucket::Wait(Operation& waited, bool collects, const IsDue& is_due) {
  std::unique_lock<std::mutex> lock(mutex);
  const Time start = Now();
  if (!waited.done) {
    arrivals.BeginWait(start);
    try {
      Time dead_since = kNever;
      while (!waited.done) {
        if (finished.wait_for(lock, PatienceOf(is_due)) == std::cv_status::no_timeout) continue;
        lock.unlock();
        if (is_due && is_due()) {
          lock.lock();
          break;
        }
        surroundings.collectives.Interrupt();
        // When Horovod shuts down, it calls back for every tensor in its queue. If it has not called back for a running
        // round after some seconds, it never will.
        const Time now = Now();
        dead_since = surroundings.collectives.Alive() ? kNever : std::min(dead_since, now);
        lock.lock();
        const Time patience = core.state() == Bucket::State::kRunning ? kDeadPatience : Time(0);
        if (!waited.done && dead_since != kNever && now - dead_since >= patience) surroundings.ThrowShutDown();
      }
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      arrivals.EndWait(false, core.completed(), Now());
      throw;
    }
    const Time end = Now();
    statistics.waited_seconds += ToSeconds(end - start);
    if (auto* recorder = surroundings.Recording()) recorder->Waited(start, end, true);
  }
  arrivals.EndWait(collects && waited.done, core.completed(), Now());
  if (!waited.error.empty()) throw EngineError(waited.error);
  return waited.done;
}

bool SharedBucket::Unsettled() const {
  // If a bucket discards late contributions, its missed results do not matter: these are older models, or empty.
  const bool misses = core.missed_gradients() > 0 && core.options().late != Late::kDiscard;
  return owner != nullptr && (core.HasPending() || misses);
}

void SharedBucket::Arrive(BucketLock& lock) {
  if (operation->arrival.output == nullptr) {
    operation->scratch.Reserve(core.bytes(), core.memory());
    operation->arrival.output = operation->scratch.data();
  }
  arrived = Now();
  if (share && operation->arrival.gradients > 0) share->End(arrived);
  if (!holds_more || arrived - surroundings.reported.load() >= kLongestSilence) surroundings.news = true;
  auto* const recorder = surroundings.Recording();
  // Under work sharing all micro-batches of an update arrive by one operation, and each of them is recorded.
  if (recorder != nullptr && operation->arrival.input != nullptr && (SharesWork() || !operation->recorded)) {
    operation->recorded = true;
    recorder->Arrived(label(), arrived);
  }
  if (SharesWork() && core.state() == Bucket::State::kArrived) return core.Add(operation->arrival.gradients);
  switch (core.Arrive(operation->arrival)) {
    case Bucket::Arrived::kOnTime: arrivals.SetOpen(true, arrived); break;
    case Bucket::Arrived::kWaiting: break;
    case Bucket::Arrived::kLate: Complete(true, lock); break;
    case Bucket::Arrived::kBusy:
      throw std::logic_error("bucket " + core.name() + " is busy without an outstanding operation");
  }
}

void SharedBucket::ArriveWhileJoined(BucketLock& lock) {
  const bool joins_first = !core.declared() && operation == nullptr && poison.empty();
  if (!joins_first || core.options().missed != Missed::kReplay || SharesWork()) return;
  operation = std::make_shared<Operation>();
  ArriveOrFail(lock);
}

void SharedBucket::ArriveOrFail(BucketLock& lock) {
  try {
    Arrive(lock);
  } catch (const std::exception& error) {
    Fail(WhyItFailed(error), lock);
  }
}

void SharedBucket::Await(std::shared_ptr<ReadyEvent> event) {
  awaited.push_back(std::move(event));
  ++surroundings.awaited;
}

void SharedBucket::StopAwaiting() {
  surroundings.awaited -= static_cast<int>(awaited.size());
  awaited.clear();
}

bool SharedBucket::ArriveWithWhatIsReady(BucketLock& lock) {
  bool any = false;
  while (operation != nullptr && !awaited.empty() && awaited.front()->Ready()) {
    awaited.pop_front();
    --surroundings.awaited;
    ArriveOrFail(lock);
    any = true;
  }
  return any;
}

void SharedBucket::End(Operation& ended, BucketLock& lock) {
  ended.done = true;
  const Time now = Now();
  const Time since = arrivals.UnattendedSince();
  if (since != kNever) statistics.waited_seconds += ToSeconds(now - since);
  arrivals.Done(core.completed(), now);  // waiting threads may not be awake yet, but wait for no other rank any more
  finished.notify_all();
  if (ended.on_done)
    lock.CallAfterwards(
        [on_done = std::exchange(ended.on_done, nullptr), self = ended.shared_from_this()] { on_done(*self); });
}

void SharedBucket::Complete(bool late, BucketLock& lock) {
  Fill(*operation, late);
  const RoundInfo& info = operation->info;
  if (auto* recorder = surroundings.Recording(); recorder != nullptr && operation->recorded)
    recorder->Got(label(), Now(), info.round, info.late, info.staleness);
  End(*std::exchange(operation, nullptr), lock);
}

void SharedBucket::Fill(Operation& result, bool late) {
  const Closing& closing = core.last();
  const Rank rank = surroundings.rank;
  RoundInfo& info = result.info;
  info.round = closing.round;
  info.late = late;
  info.fresh = closing.fresh(rank);
  info.gradients = closing.gradients(rank);
  for (const Rank member : closing.members(rank)) {
    const auto& contribution = closing.contributions[Index(member)];
    if (contribution.gradients == 0) continue;
    info.members.push_back(member);
    info.work.push_back(contribution.work);
  }
  if (!late || result.arrival.input == nullptr) return;
  info.staleness = core.missed_rounds();
  info.empty = !core.HasMissed();
  if (core.options().missed == Missed::kReplay || core.TakeMissed(result.arrival.output)) return;
  Log(LogLevel::kWarning, rank,
      "the sum of the results of " + core.name() +
          " that this rank has missed is not finite in float16. Leave the compression out.");
}

void SharedBucket::EndRound(BucketLock& lock) {
  const bool on_time = core.Finish();
  if (core.last().ends) return;
  // While the round ran, this rank could not report late contributions, or that the bucket's owner is gone.
  if (core.HasUnannounced() || OwnerIsGone()) surroundings.news = true;
  statistics.dropped = core.dropped();
  statistics.summed = core.summed();
  // While a device still computes the contribution, this rank has not arrived. Its operation waits for a later round.
  if (operation != nullptr && awaited.empty()) Complete(!on_time, lock);
}

std::string SharedBucket::WhyItFailed(const std::exception& error) const {
  return "rank " + std::to_string(surroundings.rank) + " could not keep what belongs to " + core.name() + ": " +
         error.what() + ". This bucket cannot be used any more";
}

void SharedBucket::Fail(const std::string& error, BucketLock& lock) {
  poison = error;
  StopAwaiting();
  if (const auto failed = std::exchange(operation, nullptr)) {
    failed->error = error;
    End(*failed, lock);
  }
}

void SharedBucket::FailAndThrow(const std::exception& error, BucketLock& lock) {
  const std::string why = WhyItFailed(error);
  Fail(why, lock);
  throw EngineError(why);
}

void ForEachLocked(const Buckets& buckets, const std::function<void(SharedBucket&)>& function) {
  for (const auto& bucket : buckets) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    function(*bucket);
  }
}

}  // namespace horovod_partial
