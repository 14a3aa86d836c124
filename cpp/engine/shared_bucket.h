// A bucket with its lock. Only files of the engine include this header.
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

// Functions to be called when a bucket's lock has been released. An object of this class is declared before the lock,
// and its destructor calls the functions.
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

// A bucket that the background thread (hooks and callbacks) shares with the application's threads. Never hold the locks
// of two buckets: when Horovod shuts down, it calls back with the lock of its queue held, which would close a cycle of
// locks. While a bucket's lock is held, the locks of the bucket map, the flush, possible arrivals and changes may be
// taken, but never the other way round.
struct SharedBucket {
  SharedBucket(Surroundings& the_surroundings, const std::string& name, BucketConfig bucket_config);

  Surroundings& surroundings;
  const BucketConfig config;

  mutable std::mutex mutex;          // guards all members below
  std::condition_variable finished;  // notified when an operation is done
  Bucket core;
  PossibleArrivals::Bucket arrivals;     // which threads contribute, which collect results, and which wait
  std::shared_ptr<Operation> operation;  // the outstanding operation, or null
  Time arrived{0};                       // when the last contribution arrived
  std::shared_ptr<ReadyEvent> awaited;   // not null while a device computes the contribution of `operation`
  std::shared_ptr<const Owner> owner;    // the owner; null if the bucket never retires
  std::optional<OwnShare> share;         // set only in the bucket that carries the state of work sharing
  Round update = 0;                      // number of closed rounds, which is the number of the update in `share`
  int updates = 0;                       // the number of closed rounds that had gradients
  bool wants = false;                    // true if a thread waits to begin a micro-batch
  std::string poison;                    // not empty: the bucket has failed, and every use of it throws this error
  bool flush_round = false;              // true if the running round belongs to a flush
  int draining = 0;                      // the number of waits in which the application takes this bucket's results
  bool in_flush = false;                 // true if the application takes this bucket's results in a flush
  Round flush_end = kForEver;            // once all its rounds have begun, a flush takes only rounds below this number
  BucketStatistics statistics;

  bool SharesWork() const { return config.spec.policy.rule == Policy::Rule::kWorkSharing; }
  // Returns the number of micro-batches of the open update that this rank has made.
  int Made() const { return core.state() == Bucket::State::kArrived ? core.arrival().gradients : 0; }
  bool OwnerIsGone() const { return owner != nullptr && owner->gone(); }
  bool Retired() const { return OwnerIsGone() && operation == nullptr; }
  // Returns 1 if a flush must wait for this bucket while it is in use, else 0.
  int Counts() const { return IsOfFlushes(core.name()) ? 0 : 1; }
  recording::BucketLabel label() const {
    return {surroundings.process_set, core.name(), config.spec.policy.description, core.bytes()};
  }

  // Blocks until the operation is done (returns true) or `is_due` is true (returns false). `collects` says that this
  // thread takes the result for the application, so it may contribute next. Throws EngineError. Takes the lock.
  bool Wait(Operation& waited, bool collects, const IsDue& is_due = nullptr);

  // All functions below are called with the lock held.

  // Lets the outstanding operation arrive. May throw, because a late contribution needs memory.
  void Arrive(Calls& calls);
  // Lets the outstanding operation arrive on the background thread. Instead of an exception, the bucket fails.
  void ArriveOrFail(Calls& calls);
  void StopAwaiting();
  // Gives the application its result, and ends the operation. May throw.
  void Complete(bool late, Calls& calls);
  // Ends a round whose reduction has succeeded. May throw.
  void EndRound(Calls& calls);
  // Makes the bucket begin again with round 0, as after its declaration.
  void Reset();
  // Makes every later use of the bucket fail. Nothing is cleared: nobody knows whether the pending sum was delivered.
  void Fail(const std::string& error, Calls& calls);
  // Makes every later use of the bucket fail, and throws the error, on the application's thread.
  [[noreturn]] void FailAndThrow(const std::exception& error, Calls& calls);
  std::string WhyItFailed(const std::exception& error) const;
  // Runs `work` on the background thread, and turns an error of the memory or its device into an EngineError. That ends
  // the job, because this rank cannot contribute what the other ranks count on.
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
