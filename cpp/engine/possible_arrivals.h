// Records which threads contribute to which bucket, and which threads still can (docs/protocol.md, rule 7).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/rounds/message.h"
#include "core/values/types.h"

namespace horovod_partial {

// Who hands over a contribution, and how the caller waits for the result.
struct Caller {
  enum class Kind : std::uint8_t {
    kThread,         // the calling thread, which waits for the result later, or polls
    kBlockedThread,  // the calling thread, which is blocked until the result is there
    kGraph,          // a graph of TensorFlow, whose operations any thread of TensorFlow may run
  };
  Kind kind = Kind::kThread;
  std::int64_t run = 0;  // for graphs: TensorFlow's number for this run of the graph
};

// Knows the bringers of each bucket: the threads that are expected to contribute next. These are the living threads
// that took the bucket's results in its last rounds. If none of them lives, they are the living threads that
// contributed. A rank cannot contribute to a bucket while all bringers of the bucket wait. This is exact if each bucket
// has one thread. It is not exact if threads hand buckets to each other, or wait in ways that this plugin does not see.
// So if no bucket has been used for long, all threads of the process are judged together.
//
// One object serves all process sets of a process, because a thread that waits in one process set cannot contribute in
// another. All functions are thread-safe. The mutex guards all members, and no other lock is taken while it is held.
class PossibleArrivals {
 public:
  // A collective that the program has called on Horovod itself, such as hvd.allreduce, and that has not ended. The name
  // for this in comments is "a collective of Horovod's own". A later collective of the same name has another `context`.
  struct Collective {
    std::string name;
    std::weak_ptr<const void> context;
    bool operator==(const Collective& other) const {
      return name == other.name && !context.owner_before(other.context) && !other.context.owner_before(context);
    }
  };

  // A bringer: a thread that contributes to buckets, or a set of TensorFlow graphs that run one after the other.
  struct Bringer {
    std::atomic<bool> lives{true};
    Time waits_since = kNever;   // since when the bringer has waited for a round or in a flush, or kNever
    Time parked_since = kNever;  // when the bringer began to wait in a collective of Horovod's own, or kNever
    Time polled = kNever;        // when the bringer last polled a collective of Horovod's own that had not finished
    Time polls_since = kNever;   // when the bringer began to poll Horovod's own collectives at short intervals
    // The bringer waits for one of these collectives, or polls it. All were outstanding when the background thread
    // first looked after the wait began, and have not ended since. No value: the background thread has not looked yet.
    std::optional<std::vector<Collective>> awaits;
    const void* flushes = nullptr;  // the process set in whose flush the bringer waits (its engine's address), or null
    bool graphs = false;
  };

  struct Graph;  // the buckets to which one run of a TensorFlow graph contributes

  struct Thresholds {
    // A wait for a round or in a flush is reported after this time. Most rounds end in a few cycles of Horovod, each 1
    // ms, and other ranks need not know of such waits. If the ranks that a round lacks all wait elsewhere, the round
    // closes only after they have reported this.
    Time waiting = std::chrono::milliseconds(5);
    // A thread that has waited for a collective of Horovod's own for this time is out of training: rounds do not wait
    // for it. Ordinary collectives end sooner. Until this time has passed, other ranks still wait for the thread.
    Time parked = std::chrono::milliseconds(100);
    Time silence = std::chrono::seconds(1);  // if no bucket is used for so long, all threads are judged together
  };

  // What this rank knows of collectives of Horovod's own.
  struct Foreign {
    Time since = kNever;  // since when a collective of Horovod's own has been outstanding; kNever if none is
    bool told = false;    // true if Python code reports which threads wait for or poll collectives of Horovod's own
  };

  // Says to which buckets of a process set this rank cannot contribute at present.
  struct Away {
    BucketSet absent;      // buckets whose threads are out of training: in a flush, or in a collective of Horovod's own
    BucketSet waiting;     // buckets at which this rank cannot arrive, because all their threads wait
    bool blocked = false;  // true if all known threads of this process wait or are out of training
    std::string elsewhere;     // where a blocked rank waits in another process set, in words
    Time until{0};             // what this object says holds until this time, if no event comes before
    std::uint64_t events = 0;  // how many events had happened when Look made this object
    bool operator==(const Away& other) const {
      return absent == other.absent && waiting == other.waiting && blocked == other.blocked &&
             elsewhere == other.elsewhere;
    }
  };
  // Returns to which buckets of `engine` (one process set) this rank cannot contribute. `flushes`: true if a thread
  // waits in a flush of that process set.
  Away Look(const void* engine, Time now, const Foreign& foreign, bool flushes, const Thresholds& thresholds) const;

  // A wait for a round or in a flush. It includes the reduction, and ends when the thread or graph has the result.
  struct Wait {
    Time since = kNever;
    const void* engine = nullptr;  // the process set of the bucket or flush, as the address of its engine
    std::string what;              // in words, what is waited for
    bool ends = false;             // true for a wait until all ranks have ended
  };
  // Returns the longest wait in this process. A wait until all ranks have ended counts only if there is no other wait.
  // Without any wait `since` is kNever.
  Wait LongestWait() const;
  // While an object of this class lives, a thread is in a flush. That includes the reductions of the flush.
  class FlushWait : private NonCopyable {
   public:
    FlushWait(std::shared_ptr<PossibleArrivals> bringers, const void* engine, bool ends, Time now);
    ~FlushWait();

   private:
    const std::shared_ptr<PossibleArrivals> owner_;
    std::list<Wait>::iterator wait_;
  };

  // While an object of this class lives, a thread waits in a collective of Horovod's own.
  class ForeignWait : private NonCopyable {
   public:
    ForeignWait(std::shared_ptr<PossibleArrivals> bringers, Time now);
    ~ForeignWait();

   private:
    const std::shared_ptr<PossibleArrivals> owner_;
    const std::shared_ptr<Bringer> self_;
    Time before_ = kNever;  // when an outer ForeignWait of this thread began, or kNever
  };
  // Records that the calling thread has polled a collective of Horovod's own. `over`: true if the collective is over.
  // If not, returns how long the thread has polled without a longer pause. Otherwise returns 0.
  Time Polled(bool over, Time now);
  // Returns true if some thread waits for a collective of Horovod's own, or has polled one in vain. Then the background
  // thread must call EndForeignWaits in each cycle, with all collectives of Horovod's own that are outstanding. A wait
  // ends when its collectives have ended. From then on its thread may contribute, even if it has not woken up yet.
  bool AwaitsForeign() const;
  void EndForeignWaits(const std::vector<Collective>& outstanding);

  // Returns how many events have changed the answer of Look, or may have done so. The end of a thread is not counted.
  std::uint64_t events() const { return events_; }

  // Records that the calling thread waits in a flush of `engine`. Any thread may then call EndFlush with the result.
  std::shared_ptr<Bringer> BeginFlush(const void* engine, Time now);
  void EndFlush(Bringer& bringer, Time now);

  // What is recorded of one bucket: who contributes, who collects results, and who waits.
  class Bucket : private NonCopyable {
   public:
    Bucket(std::shared_ptr<PossibleArrivals> bringers, const void* engine, std::string name);
    ~Bucket();

    // Records a contribution. `round` is the number of rounds of the bucket that have ended on this rank.
    void Arrive(const Caller& caller, Round round, Time now);
    // SetOpen records that a contribution waits for its round to close, or that this round has begun. Done records that
    // the result is there. `round` is the number of rounds of the bucket that have ended on this rank.
    void SetOpen(bool open, Time now);
    void Done(Round round, Time now);
    // Called when a thread begins or ends its wait for the result of this bucket. `collects`: true if the thread takes
    // the result, and so is expected to contribute next.
    void BeginWait(Time now);
    void EndWait(bool collects, Round round, Time now);
    // Records that the calling thread will contribute next, although other threads contributed before.
    void Claim(Round round);
    // Returns since when a caller of kind kBlockedThread or kGraph has waited for this bucket, or kNever. Such callers
    // do not call BeginWait.
    Time UnattendedSince() const;

   private:
    friend class PossibleArrivals;
    void AddWaiter(const std::shared_ptr<Bringer>& waiter, Time now);
    Time WaitsSince() const;
    struct Visit {
      std::shared_ptr<Bringer> bringer;
      Round round;
    };
    static void Add(std::vector<Visit>& visits, const std::shared_ptr<Bringer>& bringer, Round round);
    void Collect(const std::shared_ptr<Bringer>& bringer, Round round, Time now);
    void ArriveInRun(std::int64_t run, Time now);

    const std::shared_ptr<PossibleArrivals> owner_;
    const void* const engine_;
    const std::string name_;
    bool outstanding_ = false;  // true if a contribution has no result yet
    bool open_ = false;         // true if a contribution waits for a round that has not begun
    Time arrived_ = kNever;     // when the last contribution came
    Round round_ = 0;           // the round that was open when the last contribution came
    std::vector<Visit> arrivals_;
    std::vector<Visit> collections_;
    std::vector<std::shared_ptr<Bringer>> waiters_;
    Time waited_since_ = kNever;        // since when some thread has waited for this bucket
    std::shared_ptr<Bringer> blocked_;  // the thread that is blocked until its contribution has a result, or null
    std::shared_ptr<Graph> graph_;      // the graph that contributes to this bucket, or null
    Time free_ = kNever;                // when the last result was collected
    std::array<Time, 8> intervals_{};   // for each of the last rounds: the time from a result to the next contribution
    std::size_t next_interval_ = 0;
    mutable bool left_out_ = false;  // true if all threads seemed to wait in Horovod, so intervals_ omits this time
  };

 private:
  std::shared_ptr<Bringer> Self();
  std::unique_lock<std::mutex> LockForEvent();
  void SetWaiting(Bringer& bringer, Time since);
  std::vector<Bringer*> BringersOf(const Bucket& bucket) const;
  Time WaitsSince(const Bringer& bringer) const;
  bool InProgress(const Bringer& graphs) const;
  std::string WaitElsewhere(const void* engine) const;

  const std::uint64_t id_ = NextId();
  static std::uint64_t NextId();

  std::atomic<std::uint64_t> events_{0};
  mutable std::mutex mutex_;
  std::set<Bucket*> buckets_;
  std::set<std::shared_ptr<Graph>> graphs_;
  std::list<Wait> flush_waits_;
  std::shared_ptr<Bringer> all_graphs_;  // the one bringer of all graphs that have never been in progress together
  int open_ = 0;                         // the number of buckets with a contribution whose round has not begun
  int waiting_ = 0;                      // the number of bringers that wait
  std::set<std::shared_ptr<Bringer>> parked_;   // the threads that wait in a collective of Horovod's own
  std::set<std::shared_ptr<Bringer>> pollers_;  // the threads that have polled such a collective in vain
  Time active_{0};                              // when a thread last contributed, collected a result, or left a flush
};

}  // namespace horovod_partial
