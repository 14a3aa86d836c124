// One rank's buckets, with the locks and the waits around them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/rounds/bucket.h"
#include "core/rounds/bucket_spec.h"
#include "core/rounds/message.h"
#include "core/rounds/statistics.h"
#include "engine/bringers.h"
#include "engine/collectives.h"
#include "engine/farewell.h"
#include "engine/owner.h"
#include "engine/ready_event.h"
#include "recording/recorder.h"

namespace horovod_partial {

// Larger than the number of any round.
inline constexpr Round kForEver = std::numeric_limits<Round>::max();

// The library of collectives has failed or shut down. Python raises HorovodInternalError for it.
struct EngineError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a bucket is declared with: its specification, and its tensor's memory, type and shape. Only the number of the
// device may differ between the ranks.
struct BucketConfig {
  BucketSpec spec;
  Memory* memory = &Memory::Host();
  DataType type = DataType::kFloat32;
  std::vector<std::int64_t> shape;

  BucketOptions options() const;
  bool operator==(const BucketConfig& other) const;
};

struct RoundInfo {
  Round round = -1;       // the round whose result the caller got; the newest, if there were several
  bool late = false;      // the caller's contribution goes into a later round
  int fresh = 0;          // contributors that were on time in that round, in the caller's group
  int gradients = 0;      // gradients in the sum of that round, in the caller's group
  int staleness = 0;      // rounds that the caller had missed when it arrived
  bool empty = false;     // no missed round had a result: what the caller gets is no update
  Members members;        // the ranks whose contributions are in that sum
  std::vector<int> work;  // the work that each of them reported
};

// One arrival and its result. The bucket's lock guards the members.
struct Operation : std::enable_shared_from_this<Operation> {
  Bucket::Arrival arrival;
  bool done = false;
  std::string error;
  RoundInfo info;
  Buffer scratch;         // takes the result if the caller gave no output
  bool recorded = false;  // the arrival is in the recording, so the result belongs there too
  // For callers that do not wait: called once, when the operation is done, by the thread that has completed it and
  // without a lock of the engine. It may read the operation, which does not change any more. It must not block, and
  // must not call the engine.
  std::function<void(const Operation&)> on_done;
};

// One bucket of a family, and the memory for its result when a round is taken.
struct Member {
  std::string bucket;
  void* output = nullptr;
};

// The rounds that a family has taken as one step: 1 normally, more if results had to be added up.
struct TakenRounds {
  int rounds = 0;
  int gradients = 0;  // in all members; 0: there is no update
};

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

// A bucket with its lock. The background thread (hooks and callbacks) and the application's threads share it. Never
// hold the locks of two buckets: Horovod's shutdown calls back while it holds the lock of its queue, and would close a
// cycle of locks.
class SharedBucket {
 public:
  SharedBucket(std::string name, BucketConfig bucket_config, std::shared_ptr<Bringers> bringers, const void* engine)
      : config(std::move(bucket_config)), core(name, config.options()), bringers(std::move(bringers), engine, name) {}

  const BucketConfig config;

  mutable std::mutex mutex;
  std::condition_variable finished;  // notified when an operation is done
  Bucket core;
  Bringers::Bucket bringers;             // who contributes; the engine tells it of each event
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
  bool Retired() const { return owner != nullptr && owner->gone() && operation == nullptr; }
  Declaration declaration() const;
};

// The names of the buckets of one optimizer. Their results are taken together.
using Family = std::vector<std::string>;

class Engine {
 public:
  using Thresholds = Bringers::Thresholds;
  class Draining;
  class Flushing;
  class Leaving;
  // Tells whether the waiting thread has something else to do. Called any number of times, without an engine's lock.
  using IsDue = std::function<bool()>;

  Engine(Collectives& collectives, Rank rank, int size, Thresholds thresholds,
         std::shared_ptr<Bringers> bringers = std::make_shared<Bringers>(),
         std::shared_ptr<FirstFailure> first_failure = std::make_shared<FirstFailure>());

  // Sets where this rank is recorded, and the number of this process set there. Call it first, or never.
  void SetRecorder(std::shared_ptr<recording::Recorder> recorder, int process_set);
  // Sets Bringers::Foreign::told. Call it first, or never.
  void SetWaitsAreTold(bool told) { waits_are_told_ = told; }

  // --- Application's threads
  // Returns the bucket of that name, new or known. Throws std::invalid_argument if the name is bound to another
  // configuration, or the tensor has too many elements for Horovod. Throws EngineError if the generation has ended, or
  // late contributions or missed results of this rank have been lost.
  std::shared_ptr<SharedBucket> Declare(const std::string& name, const BucketConfig& config);
  // Gives the bucket of that name an owner, even before it is declared. When the owner is gone on all ranks, the bucket
  // ends: it and its statistics are forgotten. A contribution after that leaves the bucket without an owner.
  void Own(const std::string& name, std::shared_ptr<const Owner> owner);
  // Hands over a contribution. With `ready` this rank arrives when that event has come; null on the host. `on_done` may
  // be called before this returns, but is not called if this throws. Throws std::invalid_argument if an operation is
  // outstanding, and EngineError if Horovod is down or the bucket has failed. A bucket fails if its memory is used up
  // or its device fails.
  std::shared_ptr<Operation> Arrive(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Arrival& arrival,
                                    std::shared_ptr<ReadyEvent> ready = nullptr,
                                    std::function<void(const Operation&)> on_done = nullptr, const Caller& caller = {});
  bool Poll(const SharedBucket& bucket, const Operation& operation) const;
  // Blocks until the operation is done (true), or until something is due (false). Throws EngineError.
  bool Wait(SharedBucket& bucket, Operation& operation, const IsDue& is_due = nullptr) {
    return WaitFor(bucket, operation, true, is_due);
  }

  // Takes the results that this rank has missed, without an arrival. Returns null if there are none, or if an operation
  // is outstanding. Blocks while a round is reduced.
  std::shared_ptr<Operation> Collect(const std::shared_ptr<SharedBucket>& bucket, void* output);

  // Takes the oldest untaken round that has ended in all members of a family on this rank, and writes its results to
  // the members' outputs. Returns nothing if there is no such round, or the flush of this rank ends before it. Only the
  // thread that contributes to the family may call this.
  std::optional<TakenRounds> TakeRound(const std::vector<Member>& family);
  bool HasRound(const Family& family) const;
  // The calling thread will contribute to these buckets next, even if other threads did so before.
  void Claim(const Family& names);
  // True if there is a round to take, and room for at most one more result.
  bool IsNearlyFull(const Family& family) const;

  // Work sharing: blocks until this rank may begin a micro-batch of the open update. Returns the numbers of the
  // micro-batch and of the update. Returns nothing if there is a round to take first, or something is due. With
  // `begins` the micro-batch counts as begun. The first bucket of the family keeps the grants. Throws EngineError.
  std::optional<std::pair<int, int>> NextMicroBatch(const Family& family, bool begins, const IsDue& is_due = nullptr);
  // Gives back the micro-batch that was begun last: it has made no gradient, and will not.
  void ReturnMicroBatch(const std::string& bucket);

  // Delivers the late contributions of this rank, without waiting for those of others (docs/protocol.md, rule 8). Those
  // of a family are delivered by whole rounds.
  void Deliver(const std::vector<Family>& families = {});
  // Blocks until every rank that has not joined flushes too, and all late contributions of all ranks are delivered.
  void Flush();
  // Does the same, but waits until every rank has ended.
  void End();
  // Tells the other ranks that this failure ends the application. Blocks for a second at most.
  void SayFarewell(const std::string& failure);
  // Forgets late contributions and missed results of these buckets on this rank. In a family, a round that has not
  // ended in all buckets keeps its number, so that they stay together.
  void Clear(const Family& names);

  // --- Background thread
  // Returns true if this rank has something to report. `foreign_since`: since when one of Horovod's own collectives has
  // been outstanding, or kNever.
  bool WantsCycle(Time now, Time foreign_since);
  // A joined rank reports no arrivals. Those that wait are reported when the join is over.
  Report BuildReport(Time now, Time foreign_since, bool joined);
  // Call it when the join of all ranks is over.
  void ReturnFromJoin() { news_ = true; }
  // Begins the rounds that were closed in this cycle, in order. A closing with an error fails its bucket. A joined rank
  // takes part in no round. If the engine makes no entry for a round, the library below sends zeros.
  void Begin(const std::vector<Closing>& closings, bool joined);
  // Takes the coordinator's new grants. They may be fewer than before.
  void Hear(const std::vector<Grants>& grants);
  // Called when the reduction of an entry that was given to Collectives::Place has ended.
  void Finished(const std::shared_ptr<SharedBucket>& bucket, const std::string& error);

  // --- Any thread
  // Throws EngineError because Horovod has shut down. The text says why, as far as this rank has heard.
  [[noreturn]] void ThrowShutDown() const;
  // The generation has ended: every wait fails with `reason`, and nothing new is accepted.
  void Close(const std::string& reason);
  std::vector<std::shared_ptr<SharedBucket>> Buckets() const;
  std::shared_ptr<SharedBucket> Find(const std::string& name) const;
  Rank rank() const { return rank_; }
  int size() const { return size_; }

 private:
  bool WaitFor(SharedBucket& bucket, Operation& operation, bool collects, const IsDue& is_due = nullptr);
  std::shared_ptr<Operation> Arrive(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Arrival& arrival,
                                    bool delivers_nothing, std::shared_ptr<ReadyEvent> ready,
                                    std::function<void(const Operation&)> on_done, const Caller& caller);
  bool DeliverFamily(const Family& family);
  std::vector<std::shared_ptr<SharedBucket>> FindAll(const Family& names) const;
  std::optional<std::pair<int, int>> TakeGrant(const std::vector<std::shared_ptr<SharedBucket>>& family, bool begins);
  bool IsAwaited(const std::vector<std::shared_ptr<SharedBucket>>& family) const;
  bool Leaves();
  void BeginSharing(SharedBucket& bucket);
  int RoundsToTake(const std::vector<std::shared_ptr<SharedBucket>>& family, bool takes) const;
  Bringers::Away Away(Time now, Time foreign_since);
  void ArriveNow(SharedBucket& bucket, Operation& operation, Calls& calls);
  void ArriveOrFail(SharedBucket& bucket, Calls& calls);
  void ArriveWhatIsReady();
  void Enter(const std::shared_ptr<SharedBucket>& bucket);
  void Forget(const SharedBucket& bucket);
  void End(SharedBucket& bucket, Calls& calls);
  void ReleaseFlush();
  void EndIfDeadlocked();
  void Refuse(SharedBucket& bucket, const std::string& error, Calls& calls);
  void Fail(SharedBucket& bucket, const std::string& error, Calls& calls);
  [[noreturn]] void FailAndThrow(SharedBucket& bucket, const std::exception& error, Calls& calls);
  template <class Work>
  auto InMemory(const SharedBucket& bucket, const Work& work) const;
  std::string WhyItFailed(const SharedBucket& bucket, const std::exception& error) const;
  void StopAwaiting(SharedBucket& bucket);
  void TellOfRefusal(const std::string& error);
  void Done(SharedBucket& bucket, Operation& operation, Calls& calls);
  void Complete(SharedBucket& bucket, bool late, Calls& calls);
  void Fill(SharedBucket& bucket, Operation& operation, bool late);
  void EndRound(SharedBucket& bucket, Calls& calls);
  void BeginFlushRounds(int rounds, Report::Flush over);
  void CloseFlush(int number, Report::Flush over);
  void EndFlush();
  void TellFlush();
  void StopFlushing();
  void EndFlushRound(const std::string& error);
  void DrainOutstanding();
  recording::Recorder* Recording() const { return recorder_ != nullptr && recorder_->on() ? recorder_.get() : nullptr; }
  recording::BucketLabel LabelOf(const SharedBucket& bucket) const;
  void RecordResult(const SharedBucket& bucket, const Operation& operation) const;

  Collectives& collectives_;
  const Rank rank_;
  const int size_;
  const Thresholds thresholds_;
  std::shared_ptr<recording::Recorder> recorder_;
  int process_set_ = 0;
  bool waits_are_told_ = false;

  mutable std::mutex buckets_mutex_;  // guards the members down to lost_, but not the buckets' contents
  std::map<std::string, std::shared_ptr<SharedBucket>> buckets_;
  std::map<std::string, std::shared_ptr<const Owner>> owners_;  // by bucket; without owners that have left
  std::string closed_;
  std::string refused_;  // the error of the last bucket that was refused
  std::string lost_;     // contributions or results were lost with refused buckets: this error has not been thrown yet

  // Atomic, because the tick reads them in every cycle and must not wait for the application.
  std::atomic<int> awaited_{0};            // operations whose contribution a device still computes
  std::atomic<bool> news_{false};          // there is something to report
  std::atomic<bool> flush_bounds_{false};  // the flush of this rank is over, but its application is still in it
  std::atomic<bool> has_warned_{false};    // of rounds that had to be added up
  std::atomic<bool> shares_work_{false};   // some bucket keeps the grants
  std::atomic<bool> has_left_{false};      // the last report says that this rank leaves; holds until the next one
  std::atomic<int> leaving_{0};  // threads that end, flush or join: while there are any, no micro-batch begins
  std::atomic<int> in_use_{0};   // buckets that have had a round and have not ended, without those of flushes
  const std::shared_ptr<Bringers> bringers_;
  // The kind of the flush in which a thread waits: a copy of flush_ for the tick.
  std::atomic<Report::Flush> waits_in_{Report::Flush::kNone};
  // Used by the background thread only: what it has reported of this rank, and what it has found last.
  Bringers::Away reported_;
  Bringers::Away looked_;
  Time looked_foreign_ = kNever;
  std::uint64_t departures_ = 0;  // Owner::Departures() at the last report
  std::uint64_t deadlocks_;       // how many deadlocks this engine has handled
  std::string told_;              // the last error that was logged because nobody waits in its bucket here

  Farewell farewell_;  // this and the next member have their own locks
  const std::shared_ptr<FirstFailure> first_failure_;

  std::mutex flush_mutex_;  // guards the members below; may be taken under a bucket's lock, never the other way round
  std::condition_variable flush_changed_;
  std::uint64_t flush_events_ = 0;  // changes that a thread in a flush, or before a micro-batch, may wait for
  bool flush_entered_ = false;      // a thread is in a flush; the flush's rounds may run already
  Report::Flush flush_ = Report::Flush::kNone;   // the kind of the flush in which this rank waits
  int flush_number_ = 0;                         // counts this rank's flushes, because an exception may end one halfway
  int flush_reported_ = 0;                       // number of the flush in this cycle's report; 0: none
  std::shared_ptr<Bringers::Bringer> flushing_;  // the thread in the flush, until all rounds of the flush have begun
  int flush_rounds_ = 0;                         // rounds of a flush that have begun and not finished
  int flush_closed_ = 0;                         // number of the flush that these rounds belong to
  Report::Flush flush_over_ = Report::Flush::kNone;  // its kind, once all its rounds have begun
  std::optional<Report::Flush> flush_result_;
  std::string flush_error_;
  // Not empty: a bucket has failed, with this error, in which the present flush was to deliver something.
  std::string flush_refusal_;
};

// While this object lives, the calling thread waits for something else, and takes the results of these families
// meanwhile. While one of their buckets is full, none of its rounds closes. Only the thread that takes the families'
// steps may do this. Such waits may be nested.
class Engine::Draining {
 public:
  Draining(const Engine& engine, const std::vector<Family>& families);
  ~Draining() { Add(-1); }
  Draining(const Draining&) = delete;
  Draining& operator=(const Draining&) = delete;

 private:
  void Add(int waits) const;

  std::vector<std::shared_ptr<SharedBucket>> buckets_;
};

// While such an object lives, this rank begins no micro-batch.
class Engine::Leaving {
 public:
  explicit Leaving(Engine& engine) : engine_(engine) { Add(1); }
  ~Leaving() { Add(-1); }
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;

 private:
  void Add(int threads) {
    engine_.leaving_ += threads;
    if (engine_.shares_work_) engine_.news_ = true;
  }

  Engine& engine_;
};

// A flush of this rank. It lasts until the application has taken what was delivered. Only one thread uses it.
class Engine::Flushing {
 public:
  // Waits for outstanding operations first. During the flush the caller takes the results of these families as they
  // come: the other ranks wait while it has too many untaken ones. Throws std::invalid_argument if another thread is in
  // a flush, and EngineError.
  Flushing(Engine& engine, Report::Flush kind, std::vector<Family> drained);
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
  void Begin();
  void SetInFlush(bool in_flush);

  Engine& engine_;
  const Leaving leaving_;
  const Report::Flush kind_;
  const std::vector<Family> drained_;
  std::optional<Draining> draining_;
  bool over_ = false;
  bool was_needed_ = false;
};

// The monotonic clock that the engine and its callers use.
Time Now();

}  // namespace horovod_partial
