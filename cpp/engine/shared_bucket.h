// A bucket with its lock. Only the engine's files include this one; all others ask the engine.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/rounds/bucket.h"
#include "core/rounds/statistics.h"
#include "core/rounds/work_sharing.h"
#include "engine/bucket_config.h"
#include "engine/operation.h"
#include "engine/owner.h"
#include "engine/possible_arrivals.h"
#include "engine/ready_event.h"
#include "engine/surroundings.h"

namespace horovod_partial {

// Larger than the number of any round.
inline constexpr Round kForEver = std::numeric_limits<Round>::max();

// Functions to call when a bucket's lock has been released. Declare this before the lock: the destructor calls them.
class Calls {
 public:
  Calls() = default;
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;
  ~Calls() {
    for (const auto& call : calls_) call();
  }
  void Add(std::function<void()> call) { calls_.push_back(std::move(call)); }

 private:
  std::vector<std::function<void()>> calls_;
};

// The background thread (hooks and callbacks) and the application's threads share it. Never hold the locks of two
// buckets: Horovod's shutdown calls back while it holds the lock of its queue, and would close a cycle of locks. The
// locks of the bucket map, of the flush, of possible arrivals and of changes may be taken under a bucket's lock, and a
// bucket's lock is never taken under these.
struct SharedBucket {
  SharedBucket(Surroundings& the_surroundings, const std::string& name, BucketConfig bucket_config);

  Surroundings& surroundings;
  const BucketConfig config;

  mutable std::mutex mutex;          // guards all members below
  std::condition_variable finished;  // notified when an operation is done
  Bucket core;
  PossibleArrivals::Bucket arrivals;     // who contributes; it is told of each event
  std::shared_ptr<Operation> operation;  // the outstanding one, or null
  Time arrived{0};                       // time of the last arrival
  std::shared_ptr<ReadyEvent> awaited;   // not null: a device still computes the contribution of `operation`
  std::shared_ptr<const Owner> owner;    // null: the bucket never retires
  std::optional<OwnShare> share;         // only in a bucket that keeps the grants
  Round update = 0;                      // rounds that have closed: `share` is about the next one
  int updates = 0;                       // how many of those had gradients
  bool wants = false;                    // a thread waits to begin a micro-batch
  std::string poison;                    // not empty: the bucket has failed, and every use of it throws this error
  bool flush_round = false;              // the running round belongs to a flush
  int draining = 0;                      // waits in which the application takes this bucket's results
  bool in_flush = false;                 // one of these waits is a flush
  Round flush_end = kForEver;            // once that flush is over, no round from this one on is taken in it
  BucketStatistics statistics;

  bool SharesWork() const { return config.spec.policy.rule == Policy::Rule::kWorkSharing; }
  // Work sharing: micro-batches of the open update that this rank has made.
  int Made() const { return core.state() == Bucket::State::kArrived ? core.arrival().gradients : 0; }
  bool OwnerIsGone() const { return owner != nullptr && owner->gone(); }
  bool Retired() const { return OwnerIsGone() && operation == nullptr; }
  // What it adds to Surroundings::in_use while it is in use.
  int Counts() const { return IsOfFlushes(core.name()) ? 0 : 1; }
  recording::BucketLabel label() const {
    return {surroundings.process_set, core.name(), config.spec.policy.description, core.bytes()};
  }

  // Blocks until the operation is done (true), or until something is due (false). Throws EngineError. `collects`: this
  // thread takes the result, so it may contribute next. A wait that only drains is no such sign. Takes the lock.
  bool Wait(Operation& waited, bool collects, const IsDue& is_due = nullptr);

  // All that follows is called under the lock.

  // The outstanding operation arrives. May throw, because a late contribution needs memory.
  void Arrive(Calls& calls);
  // The same for the background thread. Nobody there catches an exception, so the bucket fails instead.
  void ArriveOrFail(Calls& calls);
  void StopAwaiting();
  // Gives the application its result, and ends its operation. May throw.
  void Complete(bool late, Calls& calls);
  // The reduction has succeeded. May throw.
  void EndRound(Calls& calls);
  // The bucket begins again with round 0, as after its declaration.
  void Reset();
  // From now on every use of the bucket fails. Nothing is cleared: what was pending may or may not have been delivered,
  // and no later call may pretend to know.
  void Fail(const std::string& error, Calls& calls);
  // Does the same for a caller on the application's thread, who gets the error as an exception.
  [[noreturn]] void FailAndThrow(const std::exception& error, Calls& calls);
  std::string WhyItFailed(const std::exception& error) const;
  // Background thread: runs `work`, and turns an error of the memory or its device into an EngineError. No
  // application's thread gets this exception, and this rank cannot do what the others count on.
  template <class Work>
  auto InMemory(const Work& work) const {
    try {
      return work();
    } catch (const std::logic_error&) {
      throw;
    } catch (const std::exception& error) {
      throw EngineError(WhyItFailed(error));
    }
  }

 private:
  void Fill(Operation& result, bool late);
  void End(Operation& ended, Calls& calls);
};

}  // namespace horovod_partial
