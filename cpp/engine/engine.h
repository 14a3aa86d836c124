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

#include "core/bucket.h"
#include "core/bucket_spec.h"
#include "core/message.h"
#include "core/statistics.h"
#include "engine/bringers.h"
#include "engine/collectives.h"
#include "engine/farewell.h"
#include "engine/owner.h"
#include "engine/ready_event.h"
#include "recording/recorder.h"

namespace horovod_partial {

// No round has this number.
inline constexpr Round kForEver = std::numeric_limits<Round>::max();

// The collectives' library below has failed or shut down; Python raises HorovodInternalError for it.
struct EngineError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a bucket is declared with, and the tensor that lies in it; the same on every rank.
struct BucketConfig {
  BucketSpec spec;
  Memory* memory = &Memory::Host();
  DataType type = DataType::kFloat32;
  std::vector<std::int64_t> shape;

  BucketOptions options() const;
  bool operator==(const BucketConfig& other) const;
};

struct RoundInfo {
  Round round = -1;       // whose result the caller got; of several missed ones the newest
  bool late = false;      // the caller's contribution travels with a later round
  int fresh = 0;          // contributors that were on time, in that round and in the caller's group
  int gradients = 0;      // in the sum that the caller got
  int staleness = 0;      // rounds whose results the caller had missed before it arrived
  bool empty = false;     // nothing was missed but rounds without a result: the output is zeros, and no update
  Members members;        // whose contributions are in that sum
  std::vector<int> work;  // theirs, as they reported it
};

// One arrival and its result. The members are guarded by the bucket's lock.
struct Operation : std::enable_shared_from_this<Operation> {
  Bucket::Arrival arrival;
  bool done = false;
  std::string error;
  RoundInfo info;
  Buffer scratch;         // where an arrival that only delivers has its result, which nobody asked for
  bool recorded = false;  // its arrival is in the recording, where its result belongs too
  // For callers that do not wait: called once, when the operation is done, without a lock of the engine and by
  // whichever thread has done it. It may read the operation, which changes no more, must not block, and must not call
  // the engine.
  std::function<void(const Operation&)> on_done;
};

// One bucket of a family, whose results are taken together, and where its part of the next round is to go.
struct Member {
  std::string bucket;
  void* output = nullptr;
};

// Rounds that were taken as one: one, or several that had to be added up.
struct TakenRounds {
  int rounds = 0;
  int gradients = 0;  // in all members; with none it is no update
};

// What is to be called when a bucket's lock has been released: declare it before the lock.
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

// A bucket with its lock. The background thread (hooks and callbacks) and the application's threads meet here. Never
// hold the locks of two: Horovod's shutdown calls back under its queue's lock, and would close a cycle of locks.
class SharedBucket {
 public:
  SharedBucket(std::string name, BucketConfig bucket_config, std::shared_ptr<Bringers> bringers, const void* engine)
      : config(std::move(bucket_config)), core(name, config.options()), bringers(std::move(bringers), engine, name) {}

  const BucketConfig config;

  mutable std::mutex mutex;
  std::condition_variable finished;  // an operation is done
  Bucket core;
  Bringers::Bucket bringers;             // who brings something; the engine tells it what becomes of that
  std::shared_ptr<Operation> operation;  // the outstanding one
  Time arrived{0};                       // when the last arrival was
  std::shared_ptr<ReadyEvent> awaited;   // not null: a device still makes the outstanding operation's arrival
  std::shared_ptr<const Owner> owner;    // null: it never retires
  std::optional<OwnShare> share;         // of a bucket that keeps the grants
  Round update = 0;                      // rounds that have closed: it is of the next one
  int updates = 0;                       // of them those with gradients
  bool wants = false;                    // a thread waits to begin a micro-batch
  std::string poison;                    // not empty: a round has failed, nothing more can be done with this bucket
  bool flush_round = false;              // the round that runs belongs to a flush
  int draining = 0;                      // waits during which its application takes its results as they come
  bool in_flush = false;                 // it does so in a flush
  Round flush_end = kForEver;            // and, when that is over, takes none from this round on
  BucketStatistics statistics;

  bool SharesWork() const { return config.spec.policy.rule == Policy::Rule::kWorkSharing; }
  // Micro-batches of the open update that are made here, where work is shared.
  int Made() const { return core.state() == Bucket::State::kArrived ? core.arrival().gradients : 0; }
  bool Retired() const { return owner != nullptr && owner->gone() && operation == nullptr; }
  Declaration declaration() const;
};

// The names of the buckets whose results are taken together.
using Family = std::vector<std::string>;

class Engine {
 public:
  using Thresholds = Bringers::Thresholds;
  class Draining;
  class Flushing;
  class Leaving;
  // Whether the thread that waits has something to do meanwhile; any number of times, without a lock of the engine.
  using IsDue = std::function<bool()>;

  Engine(Collectives& collectives, Rank rank, int size, Thresholds thresholds,
         std::shared_ptr<Bringers> bringers = std::make_shared<Bringers>(),
         std::shared_ptr<FirstFailure> first_failure = std::make_shared<FirstFailure>());

  // Where this rank is recorded, as this process set. Before anything else, or never.
  void SetRecorder(std::shared_ptr<recording::Recorder> recorder, int process_set);
  // Bringers::Foreign::told; likewise.
  void SetWaitsAreTold(bool told) { waits_are_told_ = told; }

  // --- Application's threads
  // Throws std::invalid_argument if the name is bound to another declaration or in use, EngineError if the library
  // below is down, or the bucket has failed, which it does where its memory is used up or its device fails.
  std::shared_ptr<SharedBucket> Declare(const std::string& name, const BucketConfig& config);
  // The bucket of that name is there for that owner, also if it has not been declared yet. When the owner is gone on
  // all ranks, the bucket ends: it and its statistics are forgotten. An arrival after that leaves it without an owner.
  void Own(const std::string& name, std::shared_ptr<const Owner> owner);
  // With `ready` the arrival counts from when that event is there; null on the host. `on_done` may be called before
  // this returns, but not where it throws.
  std::shared_ptr<Operation> Arrive(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Arrival& arrival,
                                    std::shared_ptr<ReadyEvent> ready = nullptr,
                                    std::function<void(const Operation&)> on_done = nullptr, const Caller& caller = {});
  bool Poll(const SharedBucket& bucket, const Operation& operation) const;
  // Blocks until the operation is done, true, or until something is due, false; throws EngineError.
  bool Wait(SharedBucket& bucket, Operation& operation, const IsDue& is_due = nullptr) {
    return WaitFor(bucket, operation, true, is_due);
  }

  // The results that this rank has missed, without an arrival; null if there are none, or an arrival is under way.
  // Blocks while a round is reduced.
  std::shared_ptr<Operation> Collect(const std::shared_ptr<SharedBucket>& bucket, void* output);

  // The oldest round that has ended in all members of a family on this rank, and that it has not taken. Its results go
  // to the members' outputs. Nothing if there is none, or if a flush that this rank is in ends before it. Only the
  // thread that brings something to the family may call this.
  std::optional<TakenRounds> TakeRound(const std::vector<Member>& family);
  bool HasRound(const Family& family) const;
  // The calling thread is about to bring something to these buckets, whoever did before.
  void Claim(const Family& names);
  // There is a round to take, and room for at most one more.
  bool IsNearlyFull(const Family& family) const;

  // Work sharing. Blocks until this rank may begin a micro-batch of the update that is open, and gives its number and
  // that of the update; or until there is a round to be taken before, or something is due: then it gives nothing. With
  // `begins` it is begun. The first of the family keeps the grants. Throws EngineError.
  std::optional<std::pair<int, int>> NextMicroBatch(const Family& family, bool begins, const IsDue& is_due = nullptr);
  // What has been begun last has made no gradient, and will not.
  void ReturnMicroBatch(const std::string& bucket);

  // Delivers what this rank has pending, without waiting for the others' (docs/protocol.md, rule 8); what is in a
  // family by whole rounds.
  void Deliver(const std::vector<Family>& families = {});
  // Blocks until every rank that has not joined flushes too, and everything pending anywhere is delivered.
  void Flush();
  // The same, until every rank has come to its end.
  void End();
  // The application ends by this failure, of which the other ranks are told. Blocks for a moment at most.
  void SayFarewell(const std::string& failure);
  // Forgets what is pending and missed on this rank in the buckets of that name; of several, which are a family, by
  // whole rounds.
  void Clear(const Family& names);

  // --- Background thread
  // `foreign_since`: since when a collective that is not ours has been outstanding, or kNever.
  bool WantsCycle(Time now, Time foreign_since);
  // A joined rank reports no arrivals: those that wait are reported when the join is over.
  Report BuildReport(Time now, Time foreign_since, bool joined);
  // The join of all ranks is over.
  void ReturnFromJoin() { news_ = true; }
  // All the rounds that were closed in this cycle, in order, those that were refused too. A joined rank takes part in
  // none. Where the engine makes no entry, the library below sends zeros.
  void Begin(const std::vector<Closing>& closings, bool joined);
  // The coordinator has granted micro-batches, or has taken some back.
  void Hear(const std::vector<Grants>& grants);
  // The callback of Collectives::Place.
  void Finished(const std::shared_ptr<SharedBucket>& bucket, const std::string& error);

  // --- Any thread
  // Horovod has shut down; throws EngineError that says why, as far as this rank has heard.
  [[noreturn]] void ThrowShutDown() const;
  // The generation has ended: every wait ends with `reason`, nothing new is accepted.
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

  mutable std::mutex buckets_mutex_;  // guards the maps and closed_, not the buckets
  std::map<std::string, std::shared_ptr<SharedBucket>> buckets_;
  std::map<std::string, std::shared_ptr<const Owner>> owners_;  // that have not left
  std::string closed_;
  std::string refused_;  // the error of the bucket that was refused last
  std::string lost_;     // what was pending or missed has gone with refused buckets, and nobody here has been told yet

  // Atomic, because the tick reads them in every cycle and must not wait for the application.
  std::atomic<int> awaited_{0};            // operations whose device has not made them
  std::atomic<bool> news_{false};          // there is something to report
  std::atomic<bool> flush_bounds_{false};  // the flush of this rank is over, and its application is still in it
  std::atomic<bool> has_warned_{false};    // of rounds that were added up
  std::atomic<bool> shares_work_{false};   // some bucket keeps grants
  std::atomic<bool> has_left_{false};      // the last report says that this rank leaves; it holds for that cycle
  std::atomic<int> leaving_{0};            // threads that end, flush or join: no micro-batch begins meanwhile
  std::atomic<int> in_use_{0};             // buckets of which a round has been closed, and that have not ended
  const std::shared_ptr<Bringers> bringers_;
  // A thread waits in a flush of this kind: what flush_ says, for the tick.
  std::atomic<Report::Flush> waits_in_{Report::Flush::kNone};
  // Used by the background thread only: what it has said of this rank, and what it has seen last.
  Bringers::Away reported_;
  Bringers::Away looked_;
  Time looked_foreign_ = kNever;
  std::uint64_t departures_ = 0;  // of owners, when the last report was made
  std::uint64_t deadlocks_;       // that this engine knows of
  std::string told_;              // the last error of a bucket in which nobody waits here

  Farewell farewell_;  // which has a lock of its own, and so has what follows
  const std::shared_ptr<FirstFailure> first_failure_;

  std::mutex flush_mutex_;  // guards what follows; may be taken under a bucket's lock, never the other way round
  std::condition_variable flush_changed_;
  std::uint64_t flush_events_ = 0;                   // what may have brought something to a thread that waits in it
  bool flush_entered_ = false;                       // a thread is in a flush, whose rounds may run already
  Report::Flush flush_ = Report::Flush::kNone;       // this rank waits in a flush of this kind
  int flush_number_ = 0;                             // counts this rank's flushes: an exception may end one halfway
  int flush_reported_ = 0;                           // the one that this cycle's report has told of, 0 for none
  std::shared_ptr<Bringers::Bringer> flushing_;      // the thread that waits, as long as the others may count on that
  int flush_rounds_ = 0;                             // rounds of a flush that have not finished
  int flush_closed_ = 0;                             // whose rounds these are
  Report::Flush flush_over_ = Report::Flush::kNone;  // of which kind that is, once all of them have begun
  std::optional<Report::Flush> flush_result_;
  std::string flush_error_;
  // Of the flush that waits only: a bucket has failed in which something was to be delivered.
  std::string flush_refusal_;
};

// The calling thread waits for something else, and takes the results of these families meanwhile. No round closes while
// one of their buckets is full. Only a thread that steps these families may do so. Waits may be nested.
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

// While there is one, this rank begins no micro-batch.
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

// A flush of this rank, from its beginning until what it has delivered has been taken. Of one thread.
class Engine::Flushing {
 public:
  // Waits for arrivals that are outstanding. The flush takes the results of these families as they come: the others
  // wait for it where it has too many before it.
  // Throws std::invalid_argument where another thread is in a flush, EngineError.
  Flushing(Engine& engine, Report::Flush kind, std::vector<Family> drained);
  // Gives up what is not over.
  ~Flushing();
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;

  // Blocks until there is a round to be taken from one of the families, or something else is due: true; or until every
  // rank has come and all that was pending has been delivered, which may have left such rounds: false. Throws
  // EngineError.
  bool Wait(const IsDue& is_due = nullptr);
  // There was something to wait for.
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

// Monotonic time, as the engine and its callers use it.
Time Now();

}  // namespace horovod_partial
