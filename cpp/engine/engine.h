// The engine: what one rank keeps and does for the rounds of one process set. Class Engine connects its parts.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
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

// What this rank knows of a bucket at one moment.
struct BucketSnapshot {
  std::string name;
  BucketStatistics statistics;
  std::size_t bytes_held;
  bool pending;       // true if this rank has a late contribution to deliver
  int missed_rounds;  // the number of missed rounds whose results this rank has not taken
  Round completed;    // the number of the bucket's rounds that have ended on this rank
  bool unsettled;  // true if an optimizer owns the bucket, and this rank has pending gradients or missed results of the
                   // bucket
};

class Calls;

class Engine {
 public:
  using Thresholds = PossibleArrivals::Thresholds;
  class Flushing;

  Engine(Collectives& collectives, Rank rank, int size, Thresholds thresholds,
         std::shared_ptr<PossibleArrivals> arrivals = std::make_shared<PossibleArrivals>(),
         std::shared_ptr<FirstFailure> first_failure = std::make_shared<FirstFailure>());

  // Sets the recorder of arrivals, waits and results, and the number of this process set in the recording. Call this
  // before any other function of Engine.
  void SetRecorder(std::shared_ptr<recording::Recorder> recorder, int process_set);
  // Sets whether the front end (of PyTorch, say) tells which threads wait for Horovod's own collectives. Call this at
  // the start of the session.
  void SetWaitsAreTold(bool told) { waits_are_told_ = told; }

  // --- Functions that the application's threads call:
  Families& families() { return families_; }
  WorkSharing& sharing() { return sharing_; }

  std::shared_ptr<SharedBucket> Declare(const std::string& name, const BucketConfig& config) {
    return buckets_.Declare(name, config);
  }
  // Sets the owner of a bucket, such as an optimizer, even before the bucket is declared. When all ranks' owners are
  // gone, the ranks forget the bucket and its statistics. If a contribution comes after its owner is gone, the bucket
  // has no owner any more.
  void Own(const std::string& name, const std::shared_ptr<const Owner>& owner) { buckets_.Own(name, owner); }
  // Hands over a contribution. If a device still computes it, this rank arrives when the event `ready` has come. For a
  // contribution on the host, `ready` is null. `on_done` may be called before Arrive returns, but not if Arrive throws.
  // Throws std::invalid_argument if an earlier operation of the bucket is outstanding. Throws EngineError if Horovod is
  // down or the bucket has failed. A bucket fails if its memory is used up or its device fails.
  std::shared_ptr<Operation> Arrive(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Arrival& arrival,
                                    std::shared_ptr<ReadyEvent> ready = nullptr,
                                    std::function<void(const Operation&)> on_done = nullptr, const Caller& caller = {});
  // Returns true if the operation (an arrival and its result) is done. From then on any thread may read the operation.
  bool Poll(const SharedBucket& bucket, const Operation& operation) const;
  // Blocks until the operation is done (returns true), or until `is_due` says that the thread has something else to do
  // (returns false). Throws EngineError.
  bool Wait(SharedBucket& bucket, Operation& operation, const IsDue& is_due = nullptr);

  // Takes this rank's missed results of a bucket, without an arrival. Returns null if nothing was missed, or if an
  // operation of the bucket is outstanding. Blocks while a round of the bucket is reduced.
  std::shared_ptr<Operation> Collect(const std::shared_ptr<SharedBucket>& bucket, void* output);
  // Delivers the late contributions of this rank, and does not wait for those of other ranks (docs/protocol.md, rule
  // 8). In a family the rank also arrives at buckets with nothing pending, so that all buckets come to the same round.
  void Deliver(const std::vector<Family>& families = {});
  // Begins to deliver this rank's late contributions to a bucket, by an arrival without a gradient. Without `open`,
  // returns null if nothing is pending. With `open`, returns null unless the bucket's open round has that number.
  std::shared_ptr<Operation> BeginDelivery(const std::shared_ptr<SharedBucket>& bucket,
                                           std::optional<Round> open = std::nullopt);
  // Tells the other ranks why this rank's application fails. Blocks for at most a second.
  void SayFarewell(const std::string& failure);

  // --- Functions that the background thread calls:
  // Returns true if this rank has something to report. `foreign_since` is when the oldest outstanding collective of
  // Horovod's own began, or kNever.
  bool WantsCycle(Time now, Time foreign_since);
  // Returns the report of this cycle. A joined rank reports no arrivals until the join is over.
  Report BuildReport(Time now, Time foreign_since, bool joined);
  // Called when all ranks have joined. From then on this rank reports its arrivals again.
  void ReturnFromJoin() { surroundings_.news = true; }
  // Begins the rounds that have closed in this cycle, in order. A closing with an error makes its bucket fail. A joined
  // rank takes part in no round. If this rank submits nothing for a round, Horovod sends zeros for it.
  void Begin(const std::vector<Closing>& closings, bool joined);
  // Hears from the coordinator which micro-batches this rank may begin. These may be fewer than before.
  void Hear(const std::vector<Grants>& grants) { sharing_.Hear(grants); }
  // Called when a reduction that Collectives::Place submitted is over. `error` is empty if the reduction succeeded.
  void Finished(const std::shared_ptr<SharedBucket>& bucket, const std::string& error);
  // Records that `made` communicators of groups were made for a round of a bucket, and how long that took (`setup`).
  void RecordGroups(const std::string& bucket, int made, std::chrono::nanoseconds setup);

  // --- Functions that any thread calls:
  [[noreturn]] void ThrowShutDown() const { surroundings_.ThrowShutDown(); }
  // Called when this generation of Horovod has ended: waits, later arrivals and later flushes fail with `reason`.
  void Close(const std::string& reason);
  std::shared_ptr<SharedBucket> Find(const std::string& name) const { return buckets_.Find(name); }
  Buckets FindAll(const Family& names) const { return buckets_.FindAll(names); }
  // Returns the configuration of a bucket, or null if `bucket` is null.
  static std::shared_ptr<const BucketConfig> ConfigOf(const std::shared_ptr<SharedBucket>& bucket);
  // Returns the device of some bucket that lies on a device. If all buckets lie on the host, returns the host.
  int device() const;
  // Raises the iteration number of this rank's model to at least `iteration`, and returns the new number. Returns 0 if
  // no bucket has this name.
  int CatchUp(const std::string& bucket, int iteration);
  // Returns what this rank knows of each bucket. The buckets are read one after the other, not at one moment.
  std::vector<BucketSnapshot> Snapshot() const;
  // Returns the names of buckets that were unsettled when their owners were gone. Some of them may have ended since.
  std::set<std::string> UnsettledWithoutOwner() const { return buckets_.unsettled(); }
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

  // Which threads of this rank wait: what the last report said (reported_), and what was found last (looked_). Only the
  // background thread uses these members.
  PossibleArrivals::Away reported_;
  PossibleArrivals::Away looked_;
  Time looked_foreign_ = kNever;
  std::uint64_t departures_ = 0;  // how many owners of buckets were gone at the last report
  std::uint64_t deadlocks_;       // number of handled deadlocks; a higher number in FirstFailure means a new deadlock
  std::string logged_;            // the last error that was logged because no thread waited for the failed bucket
};

// A flush of this rank. It lasts until the application has taken what the flush delivered. Only one thread uses it.
class Engine::Flushing : private NonCopyable {
 public:
  // Waits for outstanding operations, then begins the flush. During the flush the caller takes the results of
  // `families` when rounds end. Other ranks wait while the caller has too many untaken results. A flush of kind kEnding
  // waits until every rank has ended. Throws std::invalid_argument if another thread is in a flush. Throws EngineError
  // if Horovod has failed or shut down.
  Flushing(Engine& engine, Flush::Kind kind, std::vector<Family> families);
  // Leaves the flush. If the flush is not over, this rank gives it up.
  ~Flushing();

  // Blocks. Returns true when a family has a round to take, or when `is_due` returns true. Returns false when the flush
  // is over: every rank has come, and all late contributions are delivered. Even then there may be rounds to take.
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
