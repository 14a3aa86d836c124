// One rank's half of partial collectives. The parts do the work; this class leads their ways together.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/rounds/bucket.h"
#include "core/rounds/message.h"
#include "core/rounds/statistics.h"
#include "engine/bucket_config.h"
#include "engine/bucket_map.h"
#include "engine/collectives.h"
#include "engine/families.h"
#include "engine/farewell.h"
#include "engine/flush.h"
#include "engine/operation.h"
#include "engine/owner.h"
#include "engine/possible_arrivals.h"
#include "engine/ready_event.h"
#include "engine/sharing.h"
#include "engine/surroundings.h"
#include "recording/recorder.h"

namespace horovod_partial {

// What this rank knows of a bucket at one moment.
struct BucketSnapshot {
  std::string name;
  BucketStatistics statistics;
  std::size_t bytes_held;
  bool pending;       // this rank has a late contribution to deliver
  int missed_rounds;  // on this rank
  Round completed;    // rounds that have ended on this rank
  bool unsettled;     // it has an owner, and gradients of it are pending or were missed on this rank
};

class Calls;

class Engine {
 public:
  using Thresholds = PossibleArrivals::Thresholds;
  class Flushing;

  Engine(Collectives& collectives, Rank rank, int size, Thresholds thresholds,
         std::shared_ptr<PossibleArrivals> arrivals = std::make_shared<PossibleArrivals>(),
         std::shared_ptr<FirstFailure> first_failure = std::make_shared<FirstFailure>());

  // Sets where this rank is recorded, and the number of this process set there. Call it first, or never.
  void SetRecorder(std::shared_ptr<recording::Recorder> recorder, int process_set);
  // Sets PossibleArrivals::Foreign::told. Call it first, or never.
  void SetWaitsAreTold(bool told) { waits_are_told_ = told; }

  // --- Application's threads
  Families& families() { return families_; }
  WorkSharing& sharing() { return sharing_; }

  // See BucketMap::Declare.
  std::shared_ptr<SharedBucket> Declare(const std::string& name, const BucketConfig& config) {
    return buckets_.Declare(name, config);
  }
  // Gives the bucket of that name an owner, even before it is declared. When the owner is gone on all ranks, the bucket
  // ends: it and its statistics are forgotten. A contribution after that leaves the bucket without an owner.
  void Own(const std::string& name, const std::shared_ptr<const Owner>& owner) { buckets_.Own(name, owner); }
  // Hands over a contribution. With `ready` this rank arrives when that event has come; null on the host. `on_done` may
  // be called before this returns, but is not called if this throws. Throws std::invalid_argument if an operation is
  // outstanding, and EngineError if Horovod is down or the bucket has failed. A bucket fails if its memory is used up
  // or its device fails.
  std::shared_ptr<Operation> Arrive(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Arrival& arrival,
                                    std::shared_ptr<ReadyEvent> ready = nullptr,
                                    std::function<void(const Operation&)> on_done = nullptr, const Caller& caller = {});
  // True if the operation is done: then it may be read.
  bool Poll(const SharedBucket& bucket, const Operation& operation) const;
  // Blocks until the operation is done (true), or until something is due (false). Throws EngineError.
  bool Wait(SharedBucket& bucket, Operation& operation, const IsDue& is_due = nullptr);

  // Takes the results that this rank has missed, without an arrival. Returns null if there are none, or if an operation
  // is outstanding. Blocks while a round is reduced.
  std::shared_ptr<Operation> Collect(const std::shared_ptr<SharedBucket>& bucket, void* output);
  // Delivers the late contributions of this rank, without waiting for those of others (docs/protocol.md, rule 8). Those
  // of a family are delivered by whole rounds.
  void Deliver(const std::vector<Family>& families = {});
  // Begins to deliver a bucket's late contributions, by an arrival without a gradient. Returns null if there are none.
  // With `open` it arrives if that is the bucket's open round, even if nothing is pending there.
  std::shared_ptr<Operation> BeginDelivery(const std::shared_ptr<SharedBucket>& bucket,
                                           std::optional<Round> open = std::nullopt);
  // Tells the other ranks that this failure ends the application. Blocks for a second at most.
  void SayFarewell(const std::string& failure);

  // --- Background thread
  // Returns true if this rank has something to report. `foreign_since`: since when one of Horovod's own collectives has
  // been outstanding, or kNever.
  bool WantsCycle(Time now, Time foreign_since);
  // A joined rank reports no arrivals. Those that wait are reported when the join is over.
  Report BuildReport(Time now, Time foreign_since, bool joined);
  // Call it when the join of all ranks is over.
  void ReturnFromJoin() { surroundings_.news = true; }
  // Begins the rounds that were closed in this cycle, in order. A closing with an error fails its bucket. A joined rank
  // takes part in no round. If the engine makes no entry for a round, the library below sends zeros.
  void Begin(const std::vector<Closing>& closings, bool joined);
  // Takes the coordinator's new grants. They may be fewer than before.
  void Hear(const std::vector<Grants>& grants) { sharing_.Hear(grants); }
  // Called when the reduction of an entry that was given to Collectives::Place has ended.
  void Finished(const std::shared_ptr<SharedBucket>& bucket, const std::string& error);
  // Communicators of groups were made for a round of this bucket.
  void RecordGroups(const std::string& bucket, int made, std::chrono::nanoseconds setup);

  // --- Any thread
  [[noreturn]] void ThrowShutDown() const { surroundings_.ThrowShutDown(); }
  // The generation has ended: every wait fails with `reason`, and nothing new is accepted.
  void Close(const std::string& reason);
  std::shared_ptr<SharedBucket> Find(const std::string& name) const { return buckets_.Find(name); }
  // See BucketMap::FindAll.
  Buckets FindAll(const Family& names) const { return buckets_.FindAll(names); }
  // What a bucket was declared with; null if the bucket is.
  static std::shared_ptr<const BucketConfig> ConfigOf(const std::shared_ptr<SharedBucket>& bucket);
  // The device of a bucket that lies on one, or else the host.
  int device() const;
  // Returns Bucket::taken, or 0 if there is no such bucket.
  Round Taken(const std::string& bucket) const;
  // Calls Bucket::CatchUp. Returns 0 if there is no such bucket.
  int CatchUp(const std::string& bucket, int iteration);
  // Each bucket is read at another moment.
  std::vector<BucketSnapshot> Snapshot() const;
  Rank rank() const { return surroundings_.rank; }
  int size() const { return surroundings_.size; }

 private:
  std::shared_ptr<Operation> ArriveUnderLock(const std::shared_ptr<SharedBucket>& bucket,
                                             const Bucket::Arrival& arrival, std::shared_ptr<ReadyEvent> ready,
                                             std::function<void(const Operation&)> on_done, const Caller& caller,
                                             Calls& calls);
  bool DeliverTo(const Buckets& buckets, std::optional<Round> open);
  bool DeliverFamily(const Family& family);
  void WaitForOutstanding() const;
  PossibleArrivals::Away Away(Time now, Time foreign_since) const;
  void ArriveWhatIsReady();
  void EndIfDeadlocked();
  std::optional<Report::Item> ItemOf(SharedBucket& bucket, Time now, bool joined, bool trains, bool ends);
  void Refuse(SharedBucket& bucket, const std::string& error, Calls& calls);
  void End(SharedBucket& bucket, Calls& calls);
  void LogRefusal(const std::string& error);

  Surroundings surroundings_;
  const Thresholds thresholds_;
  bool waits_are_told_ = false;
  BucketMap buckets_{surroundings_};
  Flush flush_{surroundings_};
  Families families_{surroundings_, buckets_, flush_};
  WorkSharing sharing_{surroundings_, buckets_, families_};
  Farewell farewell_;

  // Used by the background thread only: what it has reported of this rank, and what it has found last.
  PossibleArrivals::Away reported_;
  PossibleArrivals::Away looked_;
  Time looked_foreign_ = kNever;
  std::uint64_t departures_ = 0;  // Owner::Departures() at the last report
  std::uint64_t deadlocks_;       // how many deadlocks this engine has handled
  std::string logged_;            // the last error that was logged because nobody waits in its bucket here
};

// A flush of this rank. It lasts until the application has taken what was delivered. Only one thread uses it.
class Engine::Flushing {
 public:
  // Waits for outstanding operations first. During the flush the caller takes the results of these families as they
  // come: the other ranks wait while it has too many untaken ones. A flush of the kind kEnding waits until every rank
  // has ended. Throws std::invalid_argument if another thread is in a flush, and EngineError.
  Flushing(Engine& engine, Flush::Kind kind, std::vector<Family> families);
  // Gives the flush up if it is not over.
  ~Flushing();
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;

  // Blocks until a family has a round to take, or something else is due (true), or until the flush is over (false). It
  // is over when every rank has come and all late contributions are delivered; even then there may be rounds to take.
  // Throws EngineError.
  bool Wait(const IsDue& is_due = nullptr);
  // True if there was anything to wait for.
  bool was_needed() const { return was_needed_; }

 private:
  void SetInFlush(bool in_flush) const;

  Engine& engine_;
  const WorkSharing::Leaving leaving_;
  const Flush::Kind kind_;
  const std::vector<Family> families_;
  Buckets buckets_;  // of these families
  std::optional<Draining> draining_;
  bool was_needed_ = false;
};

}  // namespace horovod_partial
