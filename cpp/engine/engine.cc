// The functions of class Engine that threads of the application call. cycle.cc has those of the background thread.
#include "engine/engine.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine/shared_bucket.h"

namespace horovod_partial {
namespace {

// How long a failing rank waits until its failure is reported. A cycle is enough, unless another rank is stopped.
constexpr std::chrono::milliseconds kFarewellPatience(1000);

}  // namespace

Engine::Engine(Collectives& collectives, Rank rank, int size, Thresholds thresholds,
               std::shared_ptr<PossibleArrivals> arrivals, std::shared_ptr<FirstFailure> first_failure)
    : surroundings_{collectives, rank, size, this, std::move(arrivals), std::move(first_failure)},
      thresholds_(thresholds),
      deadlocks_(surroundings_.first_failure->deadlocks()) {}

std::shared_ptr<Operation> Engine::Arrive(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Arrival& arrival,
                                          std::shared_ptr<ReadyEvent> ready,
                                          std::function<void(const Operation&)> on_done, const Caller& caller) {
  BucketLock lock(bucket->mutex);
  return ArriveUnderLock(bucket, arrival, std::move(ready), std::move(on_done), caller, lock);
}

std::shared_ptr<Operation> Engine::ArriveUnderLock(const std::shared_ptr<SharedBucket>& bucket,
                                                   const Bucket::Arrival& arrival, std::shared_ptr<ReadyEvent> ready,
                                                   std::function<void(const Operation&)> on_done, const Caller& caller,
                                                   BucketLock& lock) {
  auto operation = std::make_shared<Operation>();
  operation->arrival = arrival;
  if (!bucket->poison.empty()) throw EngineError(bucket->poison);
  if (!surroundings_.collectives.Alive()) ThrowShutDown();
  const bool adds = bucket->operation != nullptr && bucket->SharesWork();
  if (adds) {  // the application has added another micro-batch to its contribution
    operation = bucket->operation;
    operation->arrival.gradients = arrival.gradients;
  } else if (bucket->operation != nullptr) {
    throw std::invalid_argument("rank " + std::to_string(rank()) + ": the name " + bucket->core.name() +
                                " is in use by an operation that has not been synchronized; use another name");
  }
  if (!bucket->core.declared() && !adds) buckets_.Enter(bucket);
  if (arrival.input != nullptr && bucket->OwnerIsGone()) bucket->owner = nullptr;
  bucket->operation = operation;
  try {
    operation->on_done = std::move(on_done);
    bucket->arrivals.Arrive(caller, bucket->core.completed(), Now());
    if (ready != nullptr && (!bucket->awaited.empty() || !ready->Ready())) {
      bucket->Await(std::move(ready));
      return operation;
    }
    bucket->Arrive(lock);
  } catch (const std::exception& error) {
    operation->on_done = nullptr;  // the caller gets the exception, so the callback is not needed
    bucket->FailAndThrow(error, lock);
  }
  return operation;
}

bool Engine::Poll(const SharedBucket& bucket, const Operation& operation) const {
  std::lock_guard<std::mutex> lock(bucket.mutex);
  return operation.done;
}

bool Engine::Wait(SharedBucket& bucket, Operation& operation, const IsDue& is_due) {
  return bucket.Wait(operation, true, is_due);
}

std::shared_ptr<Operation> Engine::Collect(const std::shared_ptr<SharedBucket>& bucket, void* output) {
  auto operation = std::make_shared<Operation>();
  operation->arrival.input = operation->arrival.output = output;
  {
    BucketLock lock(bucket->mutex);
    if (!bucket->poison.empty()) throw EngineError(bucket->poison);
    if (bucket->operation != nullptr || !bucket->core.HasMissed()) return nullptr;
    bucket->operation = operation;
    if (bucket->core.state() == Bucket::State::kIdle) {
      try {
        bucket->Complete(true, lock);
      } catch (const std::exception& error) {
        bucket->FailAndThrow(error, lock);
      }
      return operation;
    }
    // A round of the bucket is being reduced, and the end of this round will complete the operation.
  }
  try {
    bucket->Wait(*operation, false);
  } catch (...) {  // after an interrupted wait `output` may be gone, so the results are left for a later call
    std::lock_guard<std::mutex> lock(bucket->mutex);
    if (bucket->operation == operation) bucket->operation = nullptr;
    throw;
  }
  return operation;
}

void Engine::WaitForOutstanding() const {
  for (const auto& bucket : buckets_.All()) {
    std::shared_ptr<Operation> operation;
    {
      std::lock_guard<std::mutex> lock(bucket->mutex);
      operation = bucket->operation;
    }
    if (operation != nullptr) bucket->Wait(*operation, false);
  }
}

std::shared_ptr<Operation> Engine::BeginDelivery(const std::shared_ptr<SharedBucket>& bucket,
                                                 std::optional<Round> open) {
  BucketLock lock(bucket->mutex);
  const bool needed = open ? bucket->core.completed() == *open : bucket->core.HasPending();
  return needed ? ArriveUnderLock(bucket, {}, nullptr, nullptr, {}, lock) : nullptr;
}

// Delivers this rank's late contributions to the given buckets. Returns false if there was nothing to deliver.
bool Engine::DeliverTo(const Buckets& buckets, std::optional<Round> open) {
  std::vector<std::pair<std::shared_ptr<SharedBucket>, std::shared_ptr<Operation>>> operations;
  for (const auto& bucket : buckets)
    if (auto operation = BeginDelivery(bucket, open)) operations.emplace_back(bucket, std::move(operation));
  for (const auto& [bucket, operation] : operations) bucket->Wait(*operation, false);
  return !operations.empty();
}

// Delivers this rank's late contributions to a family. The rank arrives only at the buckets with the oldest open round,
// so that all buckets of the family come to the same round. Returns false if nothing is pending.
bool Engine::DeliverFamily(const Family& family) {
  const Buckets buckets = buckets_.FindAll(family);
  bool pending = false;
  Round open = kForEver;
  ForEachLocked(buckets, [&](const SharedBucket& bucket) {
    pending = pending || bucket.core.HasPending();
    open = std::min(open, bucket.core.completed());
  });
  if (pending) DeliverTo(buckets, open);
  return pending;
}

void Engine::Deliver(const std::vector<Family>& families) {
  const WorkSharing::Leaving leaving(sharing_);
  WaitForOutstanding();
  for (const Family& family : families)
    while (DeliverFamily(family)) {
    }
  while (DeliverTo(buckets_.All(), std::nullopt)) {
  }
}

Engine::Flushing::Flushing(Engine& engine, Flush::Kind kind, std::vector<Family> families)
    : engine_(engine), leaving_(engine.sharing_), kind_(kind), families_(std::move(families)) {
  engine.WaitForOutstanding();
  engine.buckets_.ThrowIfLost();
  engine.flush_.Enter(kind);
  for (const Family& family : families_) {
    const Buckets found = engine.buckets_.FindAll(family);
    buckets_.insert(buckets_.end(), found.begin(), found.end());
  }
  draining_.emplace(buckets_);
  SetInFlush(true);
  was_needed_ = engine.flush_.Begin();
}

Engine::Flushing::~Flushing() {
  SetInFlush(false);
  draining_.reset();
  engine_.flush_.Leave();
}

void Engine::Flushing::SetInFlush(bool in_flush) const {
  ForEachLocked(buckets_, [&](SharedBucket& bucket) {
    bucket.in_flush = in_flush;
    bucket.flush_end = kForEver;
  });
}

bool Engine::Flushing::Wait(const IsDue& is_due) {
  Surroundings& surroundings = engine_.surroundings_;
  const auto has_round = [this](const Family& family) { return engine_.families_.HasRound(family); };
  const PossibleArrivals::FlushWait wait(surroundings.arrivals, &engine_, kind_ == Flush::Kind::kEnding, Now());
  while (true) {
    const std::uint64_t seen = surroundings.changes.count();
    if (engine_.flush_.IsOver()) return false;
    if (std::any_of(families_.begin(), families_.end(), has_round)) return true;
    if (surroundings.changes.Await(seen, PatienceOf(is_due))) continue;
    if (!surroundings.collectives.Alive()) surroundings.ThrowShutDown();
    if (is_due && is_due()) return true;
    surroundings.collectives.Interrupt();
  }
}

int Engine::device() const {
  for (const auto& bucket : buckets_.All())
    if (const int device = bucket->config.memory->device(); device != Memory::kHost) return device;
  return Memory::kHost;
}

int Engine::CatchUp(const std::string& name, int iteration) {
  const auto bucket = buckets_.Find(name);
  if (bucket == nullptr) return 0;
  std::lock_guard<std::mutex> lock(bucket->mutex);
  return bucket->core.CatchUp(iteration);
}

std::vector<BucketSnapshot> Engine::Snapshot() const {
  std::vector<BucketSnapshot> snapshot;
  ForEachLocked(buckets_.All(), [&](const SharedBucket& bucket) {
    const Bucket& core = bucket.core;
    snapshot.push_back({core.name(), bucket.statistics, core.held_bytes(), core.HasPending(), core.missed_rounds(),
                        core.completed(), bucket.Unsettled()});
  });
  return snapshot;
}

void Engine::Close(const std::string& shut_down) {
  const std::string reason = surroundings_.first_failure->Explain(shut_down);
  buckets_.Close(reason);
  for (const auto& bucket : buckets_.All()) {
    BucketLock lock(bucket->mutex);
    bucket->Fail(reason, lock);
  }
  flush_.Fail(reason);
}

void Engine::SayFarewell(const std::string& failure) {
  if (!surroundings_.collectives.Alive()) return;
  farewell_.Say(failure);
  surroundings_.news = true;
  farewell_.AwaitSaid(kFarewellPatience);
}

}  // namespace horovod_partial
