// Class Engine: one rank's part in the rounds (partial allreduces) of one process set. It connects the other classes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/rounds/bucket.h"
#include "core/rounds/message.h"
#include "core/rounds/statistics.h"
#include "core/values/memory.h"
#include "engine/bucket_config.h"
#include "engine/bucket_map.h"
#include "engine/collectives.h"
#include "engine/families.h"
#include "engine/farewell.h"
#include "engine/flush.h"
#include "engine/operation.h"
#include "engine/possible_arrivals.h"
#include "engine/sharing.h"
#include "engine/surroundings.h"
#include "recording/recorder.h"

namespace horovod_partial {

// What this rank knows of a bucket at one moment. A bucket is a tensor that the ranks reduce under one name, in rounds.
struct BucketSnapshot {
  std::string name;
  BucketStatistics statistics;
  std::size_t bytes_held;
  bool pending;       // true if a contribution of this rank missed its round and is not delivered yet
  int missed_rounds;  // the number of missed rounds whose results this rank has not taken
  Round completed;    // the number of the bucket's rounds that have ended on this rank
  bool unsettled;  // true if an optimizer owns the bucket, and this rank has pending gradients or missed results of the
                   // bucket
};

class BucketLock;

class Engine {
 public:
  using Thresholds = PossibleArrivals::Thresholds;
  class Flushing;

  Engine(Collectives& collectives, Rank rank, int size, Thresholds thresholds,
         std::shared_ptr<PossibleArrivals> arrivals = std::make_shared<PossibleArrivals>(),
         std::shared_ptr<FirstFailure> first_failure = std::make_shared<FirstFailure>());

  // Sets the recorder of arrivals, waits and results, and the number of this process set in the recording.
  // `waits_are_told`: true if the Python code reports which threads wait for collectives that the program calls on
  // Horovod itself, such as hvd.allreduce. Call this before any other function of Engine.
  void SetUp(std::shared_ptr<recording::Recorder> recorder, int process_set, bool waits_are_told) {
    surroundings_.recorder = std::move(recorder);
    surroundings_.process_set = process_set;
    waits_are_told_ = waits_are_told;
  }

  // --- Parts of the engine, which say themselves which threads call what:
  Families& families() { return families_; }
  WorkSharing& sharing() { return sharing_; }
  BucketMap& buckets() { return buckets_; }
  const BucketMap& buckets() const { return buckets_; }

  // --- Functions that the application's threads call:
  // Hands over a contribution. If a GPU still computes the contribution, `ready` is the event at its end, and this rank
  // counts as arrived only then. On the host `ready` is null. `on_done` may be called before Arrive returns, but not if
  // Arrive throws. Throws std::invalid_argument if an earlier operation of the bucket is outstanding. Throws
  // EngineError if Horovod is down or the bucket has failed, for example because memory is used up or a GPU has failed.
  std::shared_ptr<Operation> Arrive(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Arrival& arrival,
                                    std::shared_ptr<ReadyEvent> ready = nullptr,
                                    std::function<void(const Operation&)> on_done = nullptr, const Caller& caller = {});
  // Returns true if the operation (an arrival and its result) is done. From then on any thread may read the operation.
  bool Poll(const SharedBucket& bucket, const Operation& operation) const;
  // Blocks until the operation is done (returns true), or until `is_due` says that the thread has something else to do
  // (returns false). Throws EngineError.
  bool Wait(SharedBucket& bucket, Operation& operation, const IsDue& is_due = nullptr);

  // Takes the results of the rounds of a bucket that this rank has missed, without a contribution. Returns null if it
  // has missed none, or if an operation of the bucket is outstanding. Blocks while a round of the bucket is reduced.
  std::shared_ptr<Operation> Collect(const std::shared_ptr<SharedBucket>& bucket, void* output);
  // Delivers the late contributions of this rank, without waiting for those of other ranks (docs/protocol.md, rule 8).
  // In a family (the buckets of one optimizer) it also arrives at buckets with nothing late, so all come to one round.
  void Deliver(const std::vector<Family>& families = {});
  // Begins to deliver this rank's late contributions to a bucket, by an arrival without a gradient. Without `open`,
  // returns null if no contribution is late. With `open`, returns null unless the bucket's open round has that number.
  std::shared_ptr<Operation> BeginDelivery(const std::shared_ptr<SharedBucket>& bucket,
                                           std::optional<Round> open = std::nullopt);
  // Tells the other ranks why this rank's application fails. Blocks for at most a second.
  void SayFarewell(const std::string& failure);

  // --- Functions that the background thread calls:
  // Returns true if this rank has something to report to the coordinator. `foreign_since`: since when a collective that
  // the program called on Horovod itself has been outstanding, or kNever.
  bool WantsCycle(Time now, Time foreign_since);
  // Returns what this rank tells the coordinator in this cycle. During hvd.join() the rank reports no arrivals.
  Report BuildReport(Time now, Time foreign_since, bool joined);
  // Called when all ranks have called hvd.join(). From then on this rank reports its arrivals again.
  void ReturnFromJoin() { surroundings_.news = true; }
  // Begins the rounds that the coordinator has closed in this cycle, in order. If a closing has an error, its bucket
  // fails. A joined rank takes part in no round. If this rank submits nothing for a round, Horovod sends zeros for it.
  void Begin(const std::vector<Closing>& closings, bool joined);
  // Called when a reduction that Collectives::Place submitted is over. `error` is empty if the reduction succeeded.
  void Finished(const std::shared_ptr<SharedBucket>& bucket, const std::string& error);
  // Counts, for a bucket, that `made` communicators of groups of ranks were made, and how long that took (`setup`).
  void RecordGroups(const std::string& bucket, int made, std::chrono::nanoseconds setup);

  // --- Functions that any thread calls:
  [[noreturn]] void ThrowShutDown() const { surroundings_.ThrowShutDown(); }
  // Called when Horovod shuts down or is initialised anew. Waits, later arrivals and later flushes fail with `reason`.
  void Close(const std::string& reason);
  // Returns the GPU of some bucket that lies on a GPU. If all buckets lie on the host, returns the host.
  int device() const;
  // Raises the iteration number of this rank's model to at least `iteration`, and returns the new number. Returns 0 if
  // no bucket has this name.
  int CatchUp(const std::string& bucket, int iteration);
  // Returns what this rank knows of each bucket. The buckets are read one after the other, not at one moment.
  std::vector<BucketSnapshot> Snapshot() const;
  Rank rank() const { return surroundings_.rank; }
  int size() const { return surroundings_.size; }

 private:
  std::shared_ptr<Operation> ArriveUnderLock(const std::shared_ptr<SharedBucket>& bucket,
                                             const Bucket::Arrival& arrival, std::shared_ptr<ReadyEvent> ready,
                                             std::function<void(const Operation&)> on_done, const Caller& caller,
                                             BucketLock& lock);
  bool DeliverTo(const Buckets& buckets, std::optional<Round> open);
  bool DeliverFamily(const Family& family);
  void WaitForOutstanding() const;
  PossibleArrivals::Away Away(Time now, Time foreign_since) const;
  void ArriveWhatIsReady();
  void EndIfDeadlocked();
  std::optional<Report::Item> ItemOf(SharedBucket& bucket, Time now, bool joined, bool trains, bool ends);
  void Refuse(SharedBucket& bucket, const std::string& error, BucketLock& lock);
  void End(SharedBucket& bucket, BucketLock& lock);
  void LogRefusal(const std::string& error);

  Surroundings surroundings_;
  const Thresholds thresholds_;
  bool waits_are_told_ = false;
  BucketMap buckets_{surroundings_};
  Flush flush_{surroundings_};
  Families families_{surroundings_, buckets_, flush_};
  WorkSharing sharing_{surroundings_, buckets_, families_};
  Farewell farewell_;

  // Which threads of this rank wait: what the last report said (reported_), and what was found last (looked_). Only the
  // background thread uses these members.
  PossibleArrivals::Away reported_;
  PossibleArrivals::Away looked_;
  Time looked_foreign_ = kNever;
  std::uint64_t departures_ = 0;  // how many owners of buckets had been destroyed at the last report
  std::uint64_t deadlocks_;       // number of handled deadlocks; a higher number in FirstFailure means a new deadlock
  std::string logged_;            // the last error that was logged because no thread waited for the failed bucket
};

// A flush of this rank, until the application has taken the results of late contributions. Only one thread uses it.
class Engine::Flushing : private NonCopyable {
 public:
  // Waits for outstanding operations, then begins the flush. `families`: the buckets of each optimizer whose results
  // the caller takes during the flush. Other ranks wait while the caller has too many untaken results. A flush of kind
  // kEnding waits until every rank has ended. Throws std::invalid_argument if another thread is in a flush. Throws
  // EngineError if Horovod has failed or shut down.
  Flushing(Engine& engine, Flush::Kind kind, std::vector<Family> families);
  // Leaves the flush. If the flush is not over, this rank gives it up.
  ~Flushing();

  // Blocks. Returns true when a family has a round to take, or when `is_due` returns true. Returns false when the flush
  // is over: every rank has begun it, and all late contributions are delivered. Even then there may be rounds to take.
  // Throws EngineError if the flush fails.
  bool Wait(const IsDue& is_due = nullptr);
  // Returns true if the flush had to wait for other ranks.
  bool was_needed() const { return was_needed_; }

 private:
  void SetInFlush(bool in_flush) const;

  Engine& engine_;
  const WorkSharing::Leaving leaving_;
  const Flush::Kind kind_;
  const std::vector<Family> families_;
  Buckets buckets_;  // the buckets of all families in the flush
  std::optional<Draining> draining_;
  bool was_needed_ = false;
};

}  // namespace horovod_partial
