// A bucket with its lock. Only files in cpp/engine, and tests, include this header.
#pragma once

#include <condition_variable>
#include <deque>
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
#include "core/values/memory.h"
#include "engine/bucket_config.h"
#include "engine/bucket_map.h"
#include "engine/operation.h"
#include "engine/possible_arrivals.h"
#include "engine/surroundings.h"

namespace horovod_partial {

// Stands for no limit on rounds: it is larger than the number of any round.
inline constexpr Round kForEver = std::numeric_limits<Round>::max();

// Holds a bucket's lock. The destructor releases the lock, and then calls what CallAfterwards was given.
class BucketLock : private NonCopyable {
 public:
  explicit BucketLock(std::mutex& mutex) : lock_(mutex) {}
  ~BucketLock() {
    lock_.unlock();
    for (const auto& call : calls_) call();
  }
  void CallAfterwards(std::function<void()> call) { calls_.push_back(std::move(call)); }

 private:
  std::unique_lock<std::mutex> lock_;
  std::vector<std::function<void()>> calls_;
};

// A bucket that the background thread (hooks and callbacks) shares with the application's threads. No thread may hold
// the locks of two buckets: when Horovod shuts down, it calls back with the lock of its queue held, so a deadlock would
// be possible. Under a bucket's lock a thread may take the locks of BucketMap, Flush, PossibleArrivals and Changes.
// While a thread holds one of these four locks, it must not take a bucket's lock.
struct SharedBucket {
  SharedBucket(Surroundings& the_surroundings, const std::string& name, BucketConfig bucket_config);

  Surroundings& surroundings;
  const BucketConfig config;

  mutable std::mutex mutex;          // this mutex guards all members below
  std::condition_variable finished;  // notified when an operation is done
  Bucket core;
  PossibleArrivals::Bucket arrivals;     // which threads contribute, which collect results, and which wait
  std::shared_ptr<Operation> operation;  // the outstanding operation, or null
  Time arrived{0};                       // when the last contribution arrived
  std::shared_ptr<const Owner> owner;    // the object that uses the bucket; null if the bucket exists until shutdown
  std::optional<OwnShare> share;         // this rank's micro-batches; only with work sharing, in one bucket of a family
  Round update = 0;                      // under work sharing: the number of the open update (optimizer step)
  int updates = 0;                       // under work sharing: the number of closed rounds that had gradients
  bool wants = false;                    // true if a thread waits to begin a micro-batch
  bool holds_more = false;               // under work sharing: true if this rank can begin more without a message
  std::string poison;                    // not empty: the bucket has failed, and every use of it throws this error
  bool flush_round = false;              // true if the running round belongs to a flush
  int draining = 0;                      // the number of waits in which the application takes this bucket's results
  bool in_flush = false;                 // true if the application takes this bucket's results in a flush
  Round flush_end = kForEver;            // once all rounds of a flush have begun: the first round after the flush
  BucketStatistics statistics;
  // A device still computes the contributions that these events stand behind, oldest first. The rank arrives with each
  // of them when its event has come. Only under work sharing there may be several.
  std::deque<std::shared_ptr<ReadyEvent>> awaited;

  bool SharesWork() const { return config.spec.policy.rule == Policy::Rule::kWorkSharing; }
  // Under work sharing: returns how many micro-batches of the open update this rank has made.
  int Made() const { return core.state() == Bucket::State::kArrived ? core.arrival().gradients : 0; }
  // Under work sharing: the same, and those that a device still computes.
  int Queued() const { return Made() + static_cast<int>(awaited.size()); }
  // Under work sharing: returns true if this rank may queue another micro-batch on its device. One may wait behind the
  // one in progress, so that the device does not idle. None may wait behind the first one of an update: while that is
  // computed, the coordinator takes back what a slow rank should not begin.
  bool MayQueue() const { return awaited.size() <= (Made() > 0 ? 1u : 0u); }
  bool OwnerIsGone() const { return owner != nullptr && owner->gone(); }
  // Returns true if the bucket has an owner whose model lacks late contributions of this rank or missed results.
  bool Unsettled() const;
  bool Retired() const { return OwnerIsGone() && operation == nullptr; }
  // Returns what this bucket adds to Surroundings::in_use. That is 1, but 0 if ranks compare their models in this
  // bucket, because flushes do not wait for such a bucket.
  int Counts() const { return IsOfFlushes(core.name()) ? 0 : 1; }
  recording::BucketLabel label() const {
    return {surroundings.process_set, core.name(), config.spec.policy.description, core.bytes()};
  }

  // Blocks until the operation is done (returns true) or `is_due` returns true (returns false). `collects`: this thread
  // takes the result for the application, so it may contribute next. Throws EngineError. Takes the bucket's lock.
  bool Wait(Operation& waited, bool collects, const IsDue& is_due = nullptr);

  // All functions below are called with the bucket's lock held.

  // Makes this rank arrive with the outstanding operation. May throw, because a late contribution needs memory.
  void Arrive(BucketLock& lock);
  // Called when other ranks have had a round of this bucket while this rank was in hvd.join(), before its first
  // arrival. This rank arrives without a gradient. The arrival counts when the join is over, so that a flush waits for
  // this rank too.
  void ArriveWhileJoined(BucketLock& lock);
  // Calls Arrive on the background thread. If Arrive throws, the bucket fails, and this function does not throw.
  void ArriveOrFail(BucketLock& lock);
  void Await(std::shared_ptr<ReadyEvent> event);
  void StopAwaiting();
  // Makes this rank arrive with each contribution whose event has come. Returns true if there was one.
  bool ArriveWithWhatIsReady(BucketLock& lock);
  // Gives the application its result, and ends the outstanding operation. May throw.
  void Complete(bool late, BucketLock& lock);
  // Ends the running round when its reduction has succeeded. May throw.
  void EndRound(BucketLock& lock);
  // Forgets the rounds and the statistics of the bucket, which then begins again with round 0. `updates` goes on,
  // because the optimizer has made them.
  void Reset();
  // Makes every later use of the bucket fail. Keeps late contributions: nobody knows whether they were delivered.
  void Fail(const std::string& error, BucketLock& lock);
  // Makes every later use of the bucket fail, and throws the error, on the application's thread.
  [[noreturn]] void FailAndThrow(const std::exception& error, BucketLock& lock);
  std::string WhyItFailed(const std::exception& error) const;
  // Runs `work` on the background thread. If memory is used up or a device fails, throws EngineError. This ends the
  // job, because the rank cannot contribute what the other ranks count on.
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
  void End(Operation& ended, BucketLock& lock);
};

// Calls `function` for each bucket, with the bucket's lock held. So `function` takes no lock of a bucket.
void ForEachLocked(const Buckets& buckets, const std::function<void(SharedBucket&)>& function);

}  // namespace horovod_partial
