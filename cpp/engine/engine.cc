#include "engine/engine.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/log.h"

namespace horovod_partial {
namespace {

// Every wait looks again after this long, so that a lost wake-up is no hang.
constexpr auto kWatch = std::chrono::milliseconds(100);

// The same if something else may be due meanwhile. Horovod's own wait polls at this interval.
constexpr auto kPoll = std::chrono::milliseconds(1);

constexpr std::chrono::seconds kDeadPatience(5);

// Horovod hands the number of elements to Gloo, MPI and NCCL as an int. More would be cut off without an error.
constexpr std::size_t kMostElements = std::numeric_limits<int>::max();

constexpr std::chrono::milliseconds kFarewellPatience(1000);  // a cycle takes milliseconds, unless some rank is stopped

const char* const kShutDown = "Horovod has been shut down, by this rank or by another one that ended or failed";

// True if any bucket but those of flushes is in use here. If none is, the others compare replicas without this rank.
bool AnyTrains(const std::vector<std::shared_ptr<SharedBucket>>& buckets) {
  return std::any_of(buckets.begin(), buckets.end(), [](const auto& bucket) {
    if (IsOfFlushes(bucket->core.name())) return false;
    std::lock_guard<std::mutex> lock(bucket->mutex);
    return bucket->core.declared() && !bucket->Retired();
  });
}

int Counts(const SharedBucket& bucket) { return IsOfFlushes(bucket.core.name()) ? 0 : 1; }

// Calls BeTaken(false) at its end, after RoundsToTake has called BeTaken(true).
class BeingTaken {
 public:
  explicit BeingTaken(const std::vector<std::shared_ptr<SharedBucket>>& family) : family_(family) {}
  ~BeingTaken() {
    for (const auto& bucket : family_) {
      std::lock_guard<std::mutex> lock(bucket->mutex);
      bucket->core.BeTaken(false);
    }
  }
  BeingTaken(const BeingTaken&) = delete;
  BeingTaken& operator=(const BeingTaken&) = delete;

 private:
  const std::vector<std::shared_ptr<SharedBucket>>& family_;
};

}  // namespace

Time Now() { return std::chrono::steady_clock::now().time_since_epoch(); }

BucketOptions BucketConfig::options() const {
  BucketOptions options;
  static_cast<Handling&>(options) = spec;
  options.memory = memory;
  options.type = type;
  options.elements = 1;
  for (const std::int64_t dimension : shape) options.elements *= static_cast<std::size_t>(dimension);
  return options;
}

bool BucketConfig::operator==(const BucketConfig& other) const {
  return memory == other.memory && type == other.type && shape == other.shape && spec == other.spec;
}

Declaration SharedBucket::declaration() const {
  return {config.spec.policy,
          config.type,
          config.shape,
          config.memory->device(),
          config.spec.prescale_factor,
          config.spec.postscale_factor,
          config.spec.members};
}

Engine::Engine(Collectives& collectives, Rank rank, int size, Thresholds thresholds, std::shared_ptr<Bringers> bringers,
               std::shared_ptr<FirstFailure> first_failure)
    : collectives_(collectives),
      rank_(rank),
      size_(size),
      thresholds_(thresholds),
      bringers_(std::move(bringers)),
      deadlocks_(first_failure->deadlocks()),
      first_failure_(std::move(first_failure)) {}

// --- Recording

void Engine::SetRecorder(std::shared_ptr<recording::Recorder> recorder, int process_set) {
  recorder_ = std::move(recorder);
  process_set_ = process_set;
}

recording::BucketLabel Engine::LabelOf(const SharedBucket& bucket) const {
  return {process_set_, bucket.core.name(), bucket.config.spec.policy.description, bucket.core.bytes()};
}

// Under the bucket's lock, when the operation is done.
void Engine::RecordResult(const SharedBucket& bucket, const Operation& operation) const {
  const RoundInfo& info = operation.info;
  if (auto* recorder = Recording(); recorder != nullptr && operation.recorded)
    recorder->Got(LabelOf(bucket), Now(), {info.round, info.late, info.staleness, info.fresh, info.gradients});
}

// --- Application's threads

std::shared_ptr<SharedBucket> Engine::Declare(const std::string& name, const BucketConfig& config) {
  std::lock_guard<std::mutex> lock(buckets_mutex_);
  if (!closed_.empty()) throw EngineError(closed_);
  if (!lost_.empty()) throw EngineError(std::exchange(lost_, {}));
  const std::size_t elements = config.options().elements;
  if (elements > kMostElements) {
    throw std::invalid_argument("rank " + std::to_string(rank_) + ": " + name + " has " + std::to_string(elements) +
                                " elements, and Horovod counts up to " + std::to_string(kMostElements) +
                                " in one reduction; reduce it in parts, or split the parameter that is as large");
  }
  auto& bucket = buckets_[name];
  if (bucket == nullptr) {
    bucket = std::make_shared<SharedBucket>(name, config, bringers_, this);
    BeginSharing(*bucket);
  }
  if (!(bucket->config == config)) {
    throw std::invalid_argument("rank " + std::to_string(rank_) + ": the name " + name +
                                " is bound to another shape, dtype, policy or scaling (" + NameOf(bucket->config.type) +
                                ", " + std::to_string(bucket->config.options().elements) + " elements, " +
                                bucket->config.spec.policy.description +
                                "); use another name, or the same arguments in every round");
  }
  return bucket;
}

void Engine::Own(const std::string& name, std::shared_ptr<const Owner> owner) {
  {
    std::lock_guard<std::mutex> lock(buckets_mutex_);
    owners_[name] = owner;
  }
  const auto bucket = Find(name);
  if (bucket == nullptr) return;
  std::lock_guard<std::mutex> lock(bucket->mutex);
  bucket->owner = std::move(owner);
}

std::shared_ptr<Operation> Engine::Arrive(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Arrival& arrival,
                                          std::shared_ptr<ReadyEvent> ready,
                                          std::function<void(const Operation&)> on_done, const Caller& caller) {
  return Arrive(bucket, arrival, false, std::move(ready), std::move(on_done), caller);
}

std::shared_ptr<Operation> Engine::Arrive(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Arrival& arrival,
                                          bool delivers_nothing, std::shared_ptr<ReadyEvent> ready,
                                          std::function<void(const Operation&)> on_done, const Caller& caller) {
  auto operation = std::make_shared<Operation>();
  operation->arrival = arrival;
  Calls calls;
  std::lock_guard<std::mutex> lock(bucket->mutex);
  if (!bucket->poison.empty()) throw EngineError(bucket->poison);
  if (!collectives_.Alive()) ThrowShutDown();
  const bool adds = bucket->operation != nullptr && bucket->SharesWork();
  if (adds) {  // another micro-batch was added to the contribution
    operation = bucket->operation;
    operation->arrival.gradients = arrival.gradients + (bucket->awaited != nullptr ? operation->arrival.gradients : 0);
    StopAwaiting(*bucket);
  } else if (bucket->operation != nullptr) {
    throw std::invalid_argument("rank " + std::to_string(rank_) + ": the name " + bucket->core.name() +
                                " is in use by an operation that has not been synchronized; use another name");
  }
  // a round has delivered what was pending
  if (arrival.input == nullptr && !delivers_nothing && !bucket->core.HasPending()) {
    operation->done = true;
    return operation;
  }
  if (!bucket->core.declared() && !adds) Enter(bucket);
  if (arrival.input != nullptr && bucket->owner != nullptr && bucket->owner->gone()) bucket->owner = nullptr;
  bucket->operation = operation;
  try {
    if (arrival.output == nullptr && !adds) {
      operation->scratch.Reserve(bucket->core.bytes(), bucket->core.memory());
      operation->arrival.output = operation->scratch.data();
    }
    operation->on_done = std::move(on_done);
    bucket->bringers.Arrive(caller, bucket->core.completed(), Now());
    if (ready != nullptr && !ready->Ready()) {
      bucket->awaited = std::move(ready);
      ++awaited_;
      return operation;
    }
    ArriveNow(*bucket, *operation, calls);
  } catch (const std::exception& error) {
    operation->on_done = nullptr;  // not needed: the caller gets the exception
    FailAndThrow(*bucket, error, calls);
  }
  return operation;
}

// Under the bucket's lock, before round 0 of the bucket. The bucket may have ended since it was declared; then it is
// entered again.
void Engine::Enter(const std::shared_ptr<SharedBucket>& bucket) {
  std::lock_guard<std::mutex> lock(buckets_mutex_);
  const std::string& name = bucket->core.name();
  if (buckets_.emplace(name, bucket).first->second != bucket)
    throw std::invalid_argument("the name " + name + " has been declared anew by another thread");
  const auto owner = owners_.find(name);
  if (owner != owners_.end()) bucket->owner = owner->second;
}

// Under the bucket's lock, with the operation outstanding. May throw, because a late contribution needs memory.
void Engine::ArriveNow(SharedBucket& bucket, Operation& operation, Calls& calls) {
  bucket.arrived = Now();
  news_ = true;
  if (bucket.SharesWork() && bucket.core.state() == Bucket::State::kArrived)
    return bucket.core.Add(operation.arrival.gradients);
  if (auto* recorder = Recording(); recorder != nullptr && operation.arrival.input != nullptr && !operation.recorded) {
    operation.recorded = true;
    recorder->Arrived(LabelOf(bucket), bucket.arrived);
  }
  switch (bucket.core.Arrive(operation.arrival)) {
    case Bucket::Arrived::kOnTime: bucket.bringers.Open(bucket.arrived); break;
    case Bucket::Arrived::kWaiting: break;
    case Bucket::Arrived::kLate: Complete(bucket, true, calls); break;
    case Bucket::Arrived::kBusy:
      throw std::logic_error("bucket " + bucket.core.name() + " is busy without an outstanding operation");
  }
}

// The same for the background thread. Nobody there catches an exception, so the bucket fails instead.
void Engine::ArriveOrFail(SharedBucket& bucket, Calls& calls) {
  try {
    ArriveNow(bucket, *bucket.operation, calls);
  } catch (const std::exception& error) {
    Fail(bucket, WhyItFailed(bucket, error), calls);
  }
}

std::string Engine::WhyItFailed(const SharedBucket& bucket, const std::exception& error) const {
  return "rank " + std::to_string(rank_) + " could not keep what belongs to " + bucket.core.name() + ": " +
         error.what() + ". Nothing more can be done with this bucket";
}

// Background thread, under the bucket's lock: runs `work`, and turns an error of the memory or its device into an
// EngineError. No application's thread gets this exception, and this rank cannot do what the others count on.
template <class Work>
auto Engine::InMemory(const SharedBucket& bucket, const Work& work) const {
  try {
    return work();
  } catch (const std::logic_error&) {
    throw;
  } catch (const std::exception& error) {
    throw EngineError(WhyItFailed(bucket, error));
  }
}

// Under the bucket's lock: from now on every use of the bucket fails. Nothing is cleared: what was pending may or may
// not have been delivered, and no later call may pretend to know.
void Engine::Fail(SharedBucket& bucket, const std::string& error, Calls& calls) {
  bucket.poison = error;
  StopAwaiting(bucket);
  if (const auto operation = std::exchange(bucket.operation, nullptr)) {
    operation->error = error;
    Done(bucket, *operation, calls);
  }
}

// Does the same for a caller on the application's thread, who gets the error as an exception.
void Engine::FailAndThrow(SharedBucket& bucket, const std::exception& error, Calls& calls) {
  const std::string why = WhyItFailed(bucket, error);
  Fail(bucket, why, calls);
  throw EngineError(why);
}

bool Engine::Poll(const SharedBucket& bucket, const Operation& operation) const {
  std::lock_guard<std::mutex> lock(bucket.mutex);
  return operation.done;
}

// `collects`: this thread takes the result and becomes a bringer of the bucket. A wait that only drains is no such
// sign.
bool Engine::WaitFor(SharedBucket& bucket, Operation& operation, bool collects, const IsDue& is_due) {
  std::unique_lock<std::mutex> lock(bucket.mutex);
  const Time start = Now();
  if (!operation.done) {
    bucket.bringers.BeginWait(start);
    try {
      Time dead_since = kNever;
      while (!operation.done) {
        if (bucket.finished.wait_for(lock, is_due ? kPoll : kWatch) == std::cv_status::no_timeout) continue;
        lock.unlock();
        if (is_due && is_due()) {
          lock.lock();
          break;
        }
        collectives_.Interrupt();
        // A shutdown calls back every entry. If one is not called back, the shutdown has lost it. Only a running round
        // has an entry.
        const Time now = Now();
        dead_since = collectives_.Alive() ? kNever : std::min(dead_since, now);
        lock.lock();
        const Time patience = bucket.core.state() == Bucket::State::kRunning ? kDeadPatience : Time(0);
        if (!operation.done && dead_since != kNever && now - dead_since >= patience) ThrowShutDown();
      }
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      bucket.bringers.EndWait(false, bucket.core.completed(), Now());
      throw;
    }
    const Time end = Now();
    bucket.statistics.waited_seconds += std::chrono::duration<double>(end - start).count();
    if (auto* recorder = Recording()) recorder->Waited(LabelOf(bucket), start, end);
  }
  bucket.bringers.EndWait(collects && operation.done, bucket.core.completed(), Now());
  if (!operation.error.empty()) throw EngineError(operation.error);
  return operation.done;
}

std::shared_ptr<Operation> Engine::Collect(const std::shared_ptr<SharedBucket>& bucket, void* output) {
  auto operation = std::make_shared<Operation>();
  operation->arrival.input = operation->arrival.output = output;
  Calls calls;
  {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    if (!bucket->poison.empty()) throw EngineError(bucket->poison);
    if (bucket->operation != nullptr || !bucket->core.HasMissed()) return nullptr;
    bucket->operation = operation;
    if (bucket->core.state() == Bucket::State::kIdle) {
      try {
        Complete(*bucket, true, calls);
      } catch (const std::exception& error) {
        FailAndThrow(*bucket, error, calls);
      }
      return operation;
    }
    // Another rank has begun the next round already. The end of that round completes this operation.
  }
  try {
    WaitFor(*bucket, *operation, false);
  } catch (...) {  // interrupted: the results stay missed; `output` may not exist any more when the round ends
    std::lock_guard<std::mutex> lock(bucket->mutex);
    if (bucket->operation == operation) bucket->operation = nullptr;
    throw;
  }
  return operation;
}

// Returns how many rounds the family may take as one step: 1 normally, more if results had to be added up, 0 if no
// round has ended in every bucket, or the flush of this rank ends before it. With `takes` the results are frozen:
// otherwise the end of another round could add some of them up meanwhile.
int Engine::RoundsToTake(const std::vector<std::shared_ptr<SharedBucket>>& family, bool takes) const {
  int rounds = 1;
  int least = std::numeric_limits<int>::max();
  Round before = kForEver;  // how many rounds the flush lets this rank take
  for (const auto& bucket : family) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    if (takes) bucket->core.BeTaken(true);
    rounds = std::max(rounds, bucket->core.oldest_rounds());
    least = std::min(least, bucket->core.untaken());
    if (flush_bounds_) before = std::min(before, bucket->flush_end - bucket->core.taken());
  }
  return !family.empty() && rounds <= least && rounds <= before ? rounds : 0;
}

bool Engine::HasRound(const Family& family) const { return RoundsToTake(FindAll(family), false) > 0; }

void Engine::Claim(const Family& names) {
  for (const auto& bucket : FindAll(names)) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    bucket->bringers.Claim(bucket->core.completed());
  }
}

bool Engine::IsNearlyFull(const Family& family) const {
  const auto buckets = FindAll(family);
  const auto nearly_full = [](const auto& bucket) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    return bucket->core.untaken() + 1 >= bucket->core.options().replay_limit;
  };
  return std::any_of(buckets.begin(), buckets.end(), nearly_full) && RoundsToTake(buckets, false) > 0;
}

// It never holds the locks of all members at once. That is safe, because meanwhile rounds can only be added behind
// those that are there.
std::optional<TakenRounds> Engine::TakeRound(const std::vector<Member>& family) {
  Family names;
  for (const Member& member : family) names.push_back(member.bucket);
  const auto buckets = FindAll(names);
  TakenRounds taken;
  const BeingTaken being_taken(buckets);  // ends the freeze, also after an exception
  taken.rounds = RoundsToTake(buckets, true);
  if (taken.rounds == 0) return std::nullopt;
  Round newest = -1;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    Calls calls;
    std::lock_guard<std::mutex> lock(buckets[i]->mutex);
    // This rank may take the results of a flush even if the bucket has failed since: a rank that has ended may have
    // shut Horovod down already.
    const bool is_flushed = flush_bounds_ && buckets[i]->flush_end != kForEver;
    if (!buckets[i]->poison.empty() && !is_flushed) throw EngineError(buckets[i]->poison);
    if (buckets[i]->core.full()) news_ = true;  // the others may wait until this bucket has room
    try {
      taken.gradients += buckets[i]->core.TakeRounds(taken.rounds, family[i].output);
    } catch (const std::exception& error) {  // the members are not at the same round any more
      FailAndThrow(*buckets[i], error, calls);
    }
    newest = buckets[i]->core.taken() - 1;
  }
  if (auto* recorder = Recording())
    recorder->Applied(LabelOf(*buckets.front()), Now(), newest, taken.rounds, taken.gradients);
  if (taken.rounds > 1 && !has_warned_.exchange(true)) {
    Log(LogLevel::kWarning, rank_,
        "this rank was blocked, in a collective of Horovod's or a wait for another optimizer, while others trained: " +
            std::to_string(taken.rounds) + " rounds of " + names.front() +
            " had to be applied as one step, so that its model may differ until the next flush. Call optimizer.flush() "
            "on every "
            "rank before, say, a long evaluation on one, or give the policy a larger replay_limit");
  }
  return taken;
}

// Returns nothing if one of the buckets does not exist.
std::vector<std::shared_ptr<SharedBucket>> Engine::FindAll(const Family& names) const {
  std::lock_guard<std::mutex> lock(buckets_mutex_);
  std::vector<std::shared_ptr<SharedBucket>> buckets;
  for (const std::string& name : names) {
    const auto found = buckets_.find(name);
    if (found == buckets_.end()) return {};
    buckets.push_back(found->second);
  }
  return buckets;
}

// --- Work sharing

// Call it when a bucket is new, or has ended and begins again.
void Engine::BeginSharing(SharedBucket& bucket) {
  const Policy& policy = bucket.config.spec.policy;
  if (!policy.grants) return;
  bucket.share.emplace(rank_, policy.micro_batches / size_);
  bucket.update = bucket.updates = 0;
  shares_work_ = true;
}

std::optional<std::pair<int, int>> Engine::TakeGrant(const std::vector<std::shared_ptr<SharedBucket>>& family,
                                                     bool begins) {
  SharedBucket& keeper = *family.front();
  Round update;
  {
    std::lock_guard<std::mutex> lock(keeper.mutex);
    update = keeper.update;
  }
  for (const auto& bucket : family) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    if (!bucket->poison.empty()) throw EngineError(bucket->poison);
    if (bucket->core.taken() != update || bucket->awaited != nullptr) return std::nullopt;
  }
  // Nothing of a later update can have closed since: this rank would have to be told first, and its micro-batches done.
  std::lock_guard<std::mutex> lock(keeper.mutex);
  if (leaving_ > 0 || has_left_ || keeper.update != update || !keeper.share->MayBegin()) return std::nullopt;
  const std::pair<int, int> next(keeper.share->next(), keeper.updates);
  if (begins) {
    keeper.share->Begin();
    news_ = true;
  }
  return next;
}

std::optional<std::pair<int, int>> Engine::NextMicroBatch(const Family& names, bool begins, const IsDue& is_due) {
  const auto family = FindAll(names);
  if (family.empty()) {
    std::lock_guard<std::mutex> lock(buckets_mutex_);
    if (!refused_.empty()) throw EngineError(refused_);  // the arrival has failed, but nobody waits for its error
    throw std::invalid_argument("no micro-batch can begin before its buckets have been declared");
  }
  SharedBucket& keeper = *family.front();
  const Draining draining(*this, {names});  // the caller takes rounds as they come
  Time start{0};
  const auto tell = [&](bool wants) {
    std::lock_guard<std::mutex> lock(keeper.mutex);
    if (std::exchange(keeper.wants, wants) == wants) return;
    news_ = true;
    const Time now = Now();
    if (wants) {
      start = now;
      return keeper.bringers.BeginWait(now);
    }
    keeper.bringers.EndWait(true, keeper.core.completed(), now);
    keeper.statistics.waited_seconds += std::chrono::duration<double>(now - start).count();
    if (auto* recorder = Recording()) recorder->Waited(LabelOf(keeper), start, now);
  };
  const std::shared_ptr<void> ends(nullptr, [&](void*) { tell(false); });
  while (true) {
    std::uint64_t seen;
    {
      std::lock_guard<std::mutex> lock(flush_mutex_);
      seen = flush_events_;
    }
    if (HasRound(names)) return std::nullopt;
    if (const auto next = TakeGrant(family, begins)) return next;
    if (is_due && is_due()) return std::nullopt;
    tell(!IsAwaited(family));  // a rank that waits for its own device is at work
    if (!collectives_.Alive()) ThrowShutDown();
    std::unique_lock<std::mutex> lock(flush_mutex_);
    if (flush_changed_.wait_for(lock, is_due ? kPoll : kWatch, [&] { return flush_events_ != seen; })) continue;
    lock.unlock();
    collectives_.Interrupt();
  }
}

bool Engine::IsAwaited(const std::vector<std::shared_ptr<SharedBucket>>& family) const {
  return std::any_of(family.begin(), family.end(), [](const auto& bucket) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    return bucket->awaited != nullptr;
  });
}

void Engine::ReturnMicroBatch(const std::string& name) {
  const auto bucket = Find(name);
  if (bucket == nullptr) return;
  std::lock_guard<std::mutex> lock(bucket->mutex);
  if (!bucket->share || bucket->share->begun() <= bucket->Made()) return;
  bucket->share->Return();
  news_ = true;
}

// True if some thread leaves, so that none begins a micro-batch, and none that was begun is unfinished.
bool Engine::Leaves() {
  has_left_ = false;
  if (leaving_ == 0 || !shares_work_) return false;
  has_left_ = true;  // set before the check, so that no micro-batch begins after it
  for (const auto& bucket : Buckets()) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    const bool open = bucket->share && bucket->share->begun() != bucket->Made();
    if (bucket->SharesWork() && (open || bucket->awaited != nullptr)) return has_left_ = false;
  }
  return true;
}

void Engine::Hear(const std::vector<Grants>& grants) {
  for (const Grants& each : grants) {
    const auto bucket = Find(each.bucket);
    if (bucket == nullptr) continue;
    std::lock_guard<std::mutex> lock(bucket->mutex);
    if (bucket->share) bucket->share->Hear(each.by_rank.at(static_cast<std::size_t>(rank_)));
  }
  std::lock_guard<std::mutex> lock(flush_mutex_);
  TellFlush();
}

void Engine::DrainOutstanding() {
  for (const auto& bucket : Buckets()) {
    std::shared_ptr<Operation> operation;
    {
      std::lock_guard<std::mutex> lock(bucket->mutex);
      operation = bucket->operation;
    }
    if (operation != nullptr) WaitFor(*bucket, *operation, false);
  }
}

// Delivers the late contributions of a family, by an arrival without a gradient. It arrives only in the members whose
// open round is the oldest, so that the members stay at the same round. Returns false if nothing is pending.
bool Engine::DeliverFamily(const Family& family) {
  const auto buckets = FindAll(family);
  bool pending = false;
  Round open = kForEver;
  for (const auto& bucket : buckets) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    pending = pending || bucket->core.HasPending();
    open = std::min(open, bucket->core.completed());
  }
  if (!pending) return false;
  std::vector<std::pair<std::shared_ptr<SharedBucket>, std::shared_ptr<Operation>>> operations;
  for (const auto& bucket : buckets) {
    Round completed;
    {
      std::lock_guard<std::mutex> lock(bucket->mutex);
      completed = bucket->core.completed();
    }
    if (completed == open) operations.emplace_back(bucket, Arrive(bucket, {}, true, nullptr, nullptr, {}));
  }
  for (const auto& [bucket, operation] : operations) WaitFor(*bucket, *operation, false);
  return true;
}

void Engine::Deliver(const std::vector<Family>& families) {
  const Leaving leaving(*this);
  DrainOutstanding();
  for (const Family& family : families)
    while (DeliverFamily(family)) {
    }
  for (bool delivered = false; !delivered;) {
    std::vector<std::pair<std::shared_ptr<SharedBucket>, std::shared_ptr<Operation>>> operations;
    for (const auto& bucket : Buckets()) {
      bool pending;
      {
        std::lock_guard<std::mutex> lock(bucket->mutex);
        pending = bucket->core.HasPending();
      }
      if (pending) operations.emplace_back(bucket, Arrive(bucket, {}));
    }
    for (const auto& [bucket, operation] : operations) WaitFor(*bucket, *operation, false);
    delivered = operations.empty();
  }
}

Engine::Draining::Draining(const Engine& engine, const std::vector<Family>& families) {
  for (const Family& family : families) {
    const auto buckets = engine.FindAll(family);
    buckets_.insert(buckets_.end(), buckets.begin(), buckets.end());
  }
  Add(1);
}

void Engine::Draining::Add(int waits) const {
  for (const auto& bucket : buckets_) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    bucket->draining += waits;
  }
}

Engine::Flushing::Flushing(Engine& engine, Report::Flush kind, std::vector<Family> drained)
    : engine_(engine), leaving_(engine), kind_(kind), drained_(std::move(drained)) {
  engine.DrainOutstanding();
  {
    std::lock_guard<std::mutex> lock(engine.buckets_mutex_);
    if (!engine.lost_.empty()) throw EngineError(std::exchange(engine.lost_, {}));
  }
  {
    std::lock_guard<std::mutex> lock(engine.flush_mutex_);
    if (std::exchange(engine.flush_entered_, true))
      throw std::invalid_argument("a flush is under way in another thread");
  }
  draining_.emplace(engine, drained_);
  SetInFlush(true);
  std::lock_guard<std::mutex> lock(engine.flush_mutex_);
  Begin();
}

Engine::Flushing::~Flushing() {
  SetInFlush(false);
  draining_.reset();
  std::lock_guard<std::mutex> lock(engine_.flush_mutex_);
  engine_.flush_ = Report::Flush::kNone;
  engine_.flush_entered_ = false;
  engine_.flush_bounds_ = false;
  engine_.news_ = true;  // the others must not count on this rank's flush any more
  engine_.StopFlushing();
}

void Engine::Flushing::SetInFlush(bool in_flush) {
  for (const Family& family : drained_) {
    for (const auto& bucket : engine_.FindAll(family)) {
      std::lock_guard<std::mutex> lock(bucket->mutex);
      bucket->in_flush = in_flush;
      bucket->flush_end = kForEver;
    }
  }
}

// Under the flush's lock.
void Engine::Flushing::Begin() {
  // A single rank is never late, and has nothing pending.
  engine_.flush_bounds_ = false;
  over_ = engine_.size_ == 1 || engine_.in_use_ == 0;
  was_needed_ = was_needed_ || !over_;
  if (over_) return;
  engine_.flush_result_.reset();
  engine_.flush_refusal_.clear();
  ++engine_.flush_number_;
  engine_.flush_ = kind_;
  engine_.waits_in_ = kind_;
  engine_.flushing_ = engine_.bringers_->BeginFlush(&engine_, Now());
  engine_.news_ = true;
}

bool Engine::Flushing::Wait(const IsDue& is_due) {
  const auto has_round = [this](const Family& family) { return engine_.HasRound(family); };
  const Bringers::FlushWait wait(engine_.bringers_, &engine_, kind_ == Report::Flush::kEnding, Now());
  std::unique_lock<std::mutex> lock(engine_.flush_mutex_);
  while (!over_) {
    // Look at the result first: when all ranks have ended, another one may shut Horovod down at once.
    if (engine_.flush_result_) {
      if (kind_ == *engine_.flush_result_ || kind_ == Report::Flush::kFlushing) {
        over_ = true;
      } else {
        Begin();
      }
      continue;
    }
    if (!engine_.flush_error_.empty()) throw EngineError(engine_.flush_error_);
    if (!engine_.flush_refusal_.empty()) throw EngineError(engine_.flush_refusal_);
    const std::uint64_t seen = engine_.flush_events_;
    lock.unlock();
    if (std::any_of(drained_.begin(), drained_.end(), has_round)) return true;
    lock.lock();
    const auto changed = [&] { return engine_.flush_events_ != seen; };
    if (engine_.flush_changed_.wait_for(lock, is_due ? kPoll : kWatch, changed)) continue;
    if (!engine_.collectives_.Alive()) engine_.ThrowShutDown();
    lock.unlock();
    if (is_due && is_due()) return true;
    engine_.collectives_.Interrupt();
    lock.lock();
  }
  return false;
}

// Under the flush's lock.
void Engine::StopFlushing() {
  waits_in_ = Report::Flush::kNone;
  if (flushing_ != nullptr) bringers_->EndFlush(*std::exchange(flushing_, nullptr), Now());
}

// Under the flush's lock: the rounds of the flush are over.
void Engine::EndFlush() {
  const Report::Flush over = std::exchange(flush_over_, Report::Flush::kNone);
  if (flush_closed_ != flush_number_) return;  // that flush was given up, and another one waits now
  if (flush_error_.empty() && flush_refusal_.empty()) flush_result_ = over;
}

void Engine::Flush() { Flushing(*this, Report::Flush::kFlushing, {}).Wait(); }

void Engine::End() { Flushing(*this, Report::Flush::kEnding, {}).Wait(); }

void Engine::Clear(const Family& names) {
  const auto buckets = FindAll(names);
  Round complete = kForEver;
  for (const auto& bucket : buckets) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    complete = std::min(complete, bucket->core.completed());
  }
  for (const auto& bucket : buckets) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    bucket->core.Clear(complete);
  }
  news_ = true;  // the other ranks may have waited for this
}

// --- Background thread

Bringers::Away Engine::Away(Time now, Time foreign_since) {
  const Report::Flush flush = waits_in_;
  const Bringers::Foreign foreign{foreign_since, waits_are_told_};
  Bringers::Away away = bringers_->Look(this, now, foreign, flush != Report::Flush::kNone, thresholds_);
  if (flush == Report::Flush::kEnding) away.absent = {true, {}};  // also if other threads of it still contribute
  return away;
}

// Lets operations arrive whose contribution the device has computed.
void Engine::ArriveWhatIsReady() {
  if (awaited_ == 0) return;
  for (const auto& bucket : Buckets()) {
    Calls calls;
    std::lock_guard<std::mutex> lock(bucket->mutex);
    if (bucket->awaited == nullptr || !bucket->awaited->Ready()) continue;
    StopAwaiting(*bucket);
    ArriveOrFail(*bucket, calls);
    if (!shares_work_) continue;
    std::lock_guard<std::mutex> flush_lock(flush_mutex_);
    TellFlush();  // the next micro-batch may begin
  }
}

// Under the bucket's lock.
void Engine::StopAwaiting(SharedBucket& bucket) {
  if (std::exchange(bucket.awaited, nullptr) != nullptr) --awaited_;
}

// Rank 0 has reported that the ranks wait for each other, in one or several process sets. All waits of this process set
// end. Its buckets fail for good, because its ranks hear of it in different cycles.
void Engine::EndIfDeadlocked() {
  const std::uint64_t deadlocks = first_failure_->deadlocks();
  if (std::exchange(deadlocks_, deadlocks) == deadlocks) return;
  const std::string why = first_failure_->LastDeadlock();
  for (const auto& bucket : Buckets()) {
    Calls calls;
    std::lock_guard<std::mutex> lock(bucket->mutex);
    Fail(*bucket, why, calls);
  }
  std::lock_guard<std::mutex> lock(flush_mutex_);
  if (flush_ != Report::Flush::kNone) flush_refusal_ = why;
  TellFlush();
}

bool Engine::WantsCycle(Time now, Time foreign_since) {
  EndIfDeadlocked();
  ArriveWhatIsReady();
  if (news_ || Owner::Departures() != departures_) return true;
  // A tick comes a thousand times a second, and mostly there was no event.
  if (looked_.events == bringers_->events() && now <= looked_.until && foreign_since == looked_foreign_) return false;
  looked_ = Away(now, foreign_since);
  looked_foreign_ = foreign_since;
  return !(looked_ == reported_);
}

Report Engine::BuildReport(Time now, Time foreign_since, bool joined) {
  EndIfDeadlocked();
  ArriveWhatIsReady();  // here too, because not every library calls WantsCycle first
  news_ = false;
  if (const std::uint64_t departures = Owner::Departures(); departures != departures_) {
    departures_ = departures;
    std::lock_guard<std::mutex> lock(buckets_mutex_);
    for (auto it = owners_.begin(); it != owners_.end();) it = it->second->gone() ? owners_.erase(it) : std::next(it);
  }
  Report report;
  report.failure = farewell_.TakeUnsaid();
  // Look before the arrivals are collected. A rank that waits has arrived, and must not be reported to wait for an
  // arrival that is not in this report.
  reported_ = looked_ = Away(now, foreign_since);
  looked_foreign_ = foreign_since;
  report.absent = reported_.absent;
  report.waiting = reported_.waiting;
  report.blocked = reported_.blocked;
  report.elsewhere = reported_.elsewhere;
  report.leaves = Leaves();
  {
    std::lock_guard<std::mutex> lock(flush_mutex_);
    report.flush = flush_;
    flush_reported_ = flush_ == Report::Flush::kNone ? 0 : flush_number_;
  }
  const auto buckets = Buckets();
  const bool compares =
      std::any_of(buckets.begin(), buckets.end(), [](const auto& bucket) { return IsOfFlushes(bucket->core.name()); });
  const bool trains = !compares || AnyTrains(buckets);
  for (const auto& bucket : buckets) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    Bucket& core = bucket->core;
    const bool retired = bucket->Retired() || (!trains && core.declared() && IsOfFlushes(core.name()));
    Report::Item item;
    item.bucket = core.name();
    if (retired && !core.declared()) {
      Forget(*bucket);  // no round of it has closed, and nothing waits in it
      continue;
    }
    if (!bucket->poison.empty()) {
      item.kind = Report::Item::Kind::kRetired;
      if (retired) report.items.push_back(std::move(item));
      continue;
    }
    if (joined) core.LeaveOut(core.completed());
    item.age = std::max(now - bucket->arrived, Time(0));
    if (bucket->share && joined) bucket->share->Leave();
    const bool gone = bucket->owner != nullptr && bucket->owner->gone();
    if (bucket->share && gone) bucket->share->GiveUp(bucket->Made());
    if (bucket->share && core.declared()) item.share = bucket->share->share(bucket->wants, gone);
    if (core.state() == Bucket::State::kRunning) {
      item.kind = Report::Item::Kind::kRunning;
    } else if (core.state() == Bucket::State::kArrived && joined) {
      core.Unreport();
      continue;
    } else if (core.state() == Bucket::State::kArrived && !core.reported()) {
      item.kind = Report::Item::Kind::kArrival;
      item.gradients = InMemory(*bucket, [&] { return core.ReportArrival(); });
      item.work = core.arrival().work;
      item.full = core.wants_full_round();
      if (!core.declared()) item.declaration = bucket->declaration();
    } else {
      item.kind = retired ? Report::Item::Kind::kRetired : Report::Item::Kind::kPending;
      if (retired) core.DiscardMissed();
      // A rank that will not train any more does not contribute its old model to the others' averages.
      const bool leaves = retired || report.flush == Report::Flush::kEnding;
      if (!leaves || core.options().late != Late::kKeep) {
        item.gradients = InMemory(*bucket, [&] { return core.ReportPending(); });
        item.late = core.ReportLate();
      }
      if (!retired && core.full())
        item.backlog = bucket->draining > 0 ? Report::Backlog::kDraining : Report::Backlog::kFull;
      if (item.gradients == 0 && item.backlog == Report::Backlog::kNone && !retired && !item.share) continue;
    }
    report.items.push_back(std::move(item));
  }
  return report;
}

void Engine::Begin(const std::vector<Closing>& closings, bool joined) {
  std::string lost;   // the error of buckets that were in use here and are gone
  bool told = false;  // some thread of this rank gets that error
  int flush_rounds = 0;
  Report::Flush flush_over = Report::Flush::kNone;
  for (const auto& closing : closings) {
    // A closing with an error does not end a flush: the coordinator begins that flush again.
    const bool round = closing.error.empty() && !joined;
    if (round && closing.flush_over != Report::Flush::kNone) flush_over = closing.flush_over;
    const auto bucket = Find(closing.bucket);
    if (bucket == nullptr) {
      if (closing.bucket == Farewell::kBucket && !closing.error.empty()) first_failure_->Hear(closing.error);
      if (closing.bucket == FirstFailure::kDeadlock) {
        first_failure_->HearOfDeadlock(closing.error);
        ++deadlocks_;  // this process set's own waits have got their errors already
      }
      TellOfRefusal(closing.error);
      continue;
    }
    Calls calls;
    std::lock_guard<std::mutex> lock(bucket->mutex);
    if (!closing.error.empty()) {
      if (bucket->operation == nullptr) TellOfRefusal(closing.error);
      told = told || bucket->operation != nullptr || waits_in_ != Report::Flush::kNone;
      if (bucket->core.declared() && !bucket->Retired()) lost = closing.error;
      Refuse(*bucket, closing.error, calls);
      continue;
    }
    if (bucket->share) {
      bucket->share->Advance();
      bucket->update = closing.round + 1;
      bucket->updates += closing.gradients() > 0 ? 1 : 0;
    }
    if (joined || !bucket->poison.empty()) {  // the library below sends zeros
      if (joined) bucket->core.LeaveOut(closing.round + 1);
      if (closing.ends) End(*bucket, calls);
      continue;
    }
    // This rank has arrived, but has not reported it or declared the bucket, and the round needs its entry. The library
    // sends zeros for it, and the arrival goes on waiting.
    if (!bucket->core.declared() && !bucket->core.reported() && closing.Includes(rank_)) continue;
    const bool first = !bucket->core.declared();
    const Bucket::Entry entry = InMemory(*bucket, [&] { return bucket->core.Begin(closing, rank_); });
    bucket->flush_round = closing.flushes && entry.member;
    if (closing.flushes && bucket->in_flush) bucket->flush_end = closing.round + 1;
    flush_rounds += bucket->flush_round ? 1 : 0;
    bucket->statistics.Record(closing);
    collectives_.Place(bucket, entry);
    if (entry.member) bucket->bringers.Settle();
    if (first && bucket->core.declared()) in_use_ += Counts(*bucket);
    if (closing.ends && !entry.member) End(*bucket, calls);
  }
  if (!lost.empty() && !told) {
    std::lock_guard<std::mutex> lock(buckets_mutex_);
    lost_ = lost;
  }
  if (flush_rounds > 0 || flush_over != Report::Flush::kNone) BeginFlushRounds(flush_rounds, flush_over);
  ReleaseFlush();
}

void Engine::BeginFlushRounds(int rounds, Report::Flush over) {
  std::lock_guard<std::mutex> lock(flush_mutex_);
  flush_rounds_ += rounds;
  if (over == Report::Flush::kNone) return;
  CloseFlush(flush_reported_, over);
}

// Under the flush's lock: all rounds of that flush have begun on this rank. Its thread waits for no other rank any
// more, though a device may still reduce. It must not seem to wait, or the others' next round may close without this
// rank.
void Engine::CloseFlush(int number, Report::Flush over) {
  flush_closed_ = number;
  flush_over_ = over;
  flush_bounds_ = true;
  if (flush_closed_ == flush_number_) {
    flush_ = Report::Flush::kNone;
    StopFlushing();
  }
  if (flush_rounds_ == 0) EndFlush();
  TellFlush();
}

// Under the flush's lock.
void Engine::TellFlush() {
  ++flush_events_;
  flush_changed_.notify_all();
}

// Under the bucket's lock.
void Engine::Forget(const SharedBucket& bucket) {
  std::lock_guard<std::mutex> lock(buckets_mutex_);
  buckets_.erase(bucket.core.name());
}

// Under the bucket's lock: the last round of the bucket is over, and has delivered everything. A contribution that came
// since that was decided begins a new bucket of the same name.
void Engine::End(SharedBucket& bucket, Calls& calls) {
  if (bucket.operation != nullptr && bucket.operation->arrival.input == nullptr) Complete(bucket, true, calls);
  if (bucket.core.declared()) in_use_ -= Counts(bucket);
  bucket.core = Bucket(bucket.core.name(), bucket.core.options());
  BeginSharing(bucket);
  bucket.statistics = {};
  if (bucket.operation == nullptr) return Forget(bucket);
  if (bucket.awaited == nullptr) ArriveOrFail(bucket, calls);
}

// If no bucket is left, a flush has nothing to wait for, and no closing would end it. So it ends here. A rank that
// begins a flush now does not wait either.
void Engine::ReleaseFlush() {
  if (in_use_ > 0) return;
  std::lock_guard<std::mutex> lock(flush_mutex_);
  if (flush_ != Report::Flush::kNone) CloseFlush(flush_number_, flush_);
}

// Under the bucket's lock: the arrival fails, and the name is free again, on every rank. A flush that waits here fails
// too: it cannot deliver what was pending.
void Engine::Refuse(SharedBucket& bucket, const std::string& error, Calls& calls) {
  if (bucket.core.declared()) {
    in_use_ -= Counts(bucket);
    std::lock_guard<std::mutex> lock(flush_mutex_);
    if (flush_ != Report::Flush::kNone) flush_refusal_ = error;
    TellFlush();
  }
  Fail(bucket, error, calls);
  {
    std::lock_guard<std::mutex> lock(buckets_mutex_);
    refused_ = error;
  }
  Forget(bucket);
}

// Logs the error of a bucket in which no thread of this rank waits. This rank may wait elsewhere because of it.
void Engine::TellOfRefusal(const std::string& error) {
  if (!error.empty() && std::exchange(told_, error) != error) Log(LogLevel::kError, rank_, error);
}

void Engine::Done(SharedBucket& bucket, Operation& operation, Calls& calls) {
  operation.done = true;
  const Time now = Now();
  const Time since = bucket.bringers.UnattendedSince();
  if (since != kNever) bucket.statistics.waited_seconds += std::chrono::duration<double>(now - since).count();
  bucket.bringers.Done(bucket.core.completed(), now);  // its threads may still be asleep, but they do not wait any more
  bucket.finished.notify_all();
  if (operation.on_done)
    calls.Add(
        [on_done = std::exchange(operation.on_done, nullptr), self = operation.shared_from_this()] { on_done(*self); });
}

// Under the bucket's lock: gives the application its result, and ends its operation.
void Engine::Complete(SharedBucket& bucket, bool late, Calls& calls) {
  Fill(bucket, *bucket.operation, late);
  RecordResult(bucket, *bucket.operation);
  Done(bucket, *std::exchange(bucket.operation, nullptr), calls);
}

// Under the bucket's lock. May throw.
void Engine::Fill(SharedBucket& bucket, Operation& operation, bool late) {
  const Closing& closing = bucket.core.last();
  operation.info.round = closing.round;
  operation.info.late = late;
  operation.info.fresh = closing.fresh(rank_);
  operation.info.gradients = closing.gradients(rank_);
  for (const Rank member : closing.members(rank_)) {
    const auto& contribution = closing.contributions[static_cast<std::size_t>(member)];
    if (contribution.gradients == 0) continue;
    operation.info.members.push_back(member);
    operation.info.work.push_back(contribution.work);
  }
  if (late && operation.arrival.input != nullptr) {
    operation.info.staleness = bucket.core.missed_rounds();
    operation.info.empty = !bucket.core.HasMissed();
    if (bucket.core.options().missed == Missed::kReplay || bucket.core.TakeMissed(operation.arrival.output)) return;
    Log(LogLevel::kWarning, rank_,
        "the sum of the results of " + bucket.core.name() +
            " that this rank has missed is not finite in float16. Leave the compression out.");
  }
}

void Engine::EndFlushRound(const std::string& error) {
  std::lock_guard<std::mutex> lock(flush_mutex_);
  if (!error.empty()) flush_error_ = error;
  if (--flush_rounds_ == 0 && flush_over_ != Report::Flush::kNone) EndFlush();
  TellFlush();
}

// Under the bucket's lock: the reduction has succeeded. May throw.
void Engine::EndRound(SharedBucket& bucket, Calls& calls) {
  const bool on_time = bucket.core.Finish();
  if (bucket.core.last().ends) return;
  // There is something that could not be reported while the round was running.
  if (bucket.core.HasUnannounced() || (bucket.owner != nullptr && bucket.owner->gone())) news_ = true;
  bucket.statistics.dropped = bucket.core.dropped();
  bucket.statistics.summed = bucket.core.summed();
  // If a device still computes the operation's contribution, it has not arrived, and waits for a later round.
  if (bucket.operation != nullptr && bucket.awaited == nullptr) Complete(bucket, !on_time, calls);
}

void Engine::Finished(const std::shared_ptr<SharedBucket>& bucket, const std::string& error) {
  Calls calls;
  std::lock_guard<std::mutex> lock(bucket->mutex);
  const bool ends = bucket->core.last().ends;
  std::string failure = error;
  try {
    if (failure.empty()) EndRound(*bucket, calls);
  } catch (const std::exception& exception) {  // a device may fail, and Horovod's callback must not throw
    failure = WhyItFailed(*bucket, exception);
  }
  if (!failure.empty()) Fail(*bucket, failure, calls);
  if (ends) End(*bucket, calls);
  if (std::exchange(bucket->flush_round, false)) {
    EndFlushRound(failure);
  } else if (bucket->draining > 0) {
    std::lock_guard<std::mutex> flush_lock(flush_mutex_);
    TellFlush();
  }
  if (ends) ReleaseFlush();
}

// --- Any thread

void Engine::Close(const std::string& shut_down) {
  const std::string reason = first_failure_->Explain(shut_down);
  {
    std::lock_guard<std::mutex> lock(buckets_mutex_);
    closed_ = reason;
  }
  for (const auto& bucket : Buckets()) {
    Calls calls;
    std::lock_guard<std::mutex> lock(bucket->mutex);
    Fail(*bucket, reason, calls);
  }
  std::lock_guard<std::mutex> lock(flush_mutex_);
  flush_error_ = reason;
  TellFlush();
}

void Engine::SayFarewell(const std::string& failure) {
  if (!collectives_.Alive()) return;
  farewell_.Say(failure);
  news_ = true;
  farewell_.AwaitSaid(kFarewellPatience);
}

void Engine::ThrowShutDown() const { throw EngineError(first_failure_->Explain(kShutDown)); }

std::vector<std::shared_ptr<SharedBucket>> Engine::Buckets() const {
  std::lock_guard<std::mutex> lock(buckets_mutex_);
  std::vector<std::shared_ptr<SharedBucket>> buckets;
  for (const auto& [name, bucket] : buckets_) buckets.push_back(bucket);
  return buckets;
}

std::shared_ptr<SharedBucket> Engine::Find(const std::string& name) const {
  std::lock_guard<std::mutex> lock(buckets_mutex_);
  const auto it = buckets_.find(name);
  return it == buckets_.end() ? nullptr : it->second;
}

}  // namespace horovod_partial
