// Records which threads of a process contribute to which bucket, and which still can (docs/protocol.md, rule 7).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "core/rounds/message.h"
#include "core/values/types.h"

namespace horovod_partial {

// Says what kind of caller hands over a contribution, and how it waits for the result.
struct Caller {
  enum class Kind : std::uint8_t {
    kThread,         // the calling thread; it waits for the result later, or polls
    kBlockedThread,  // the calling thread; it is blocked until the result is there
    kGraph,          // a TensorFlow graph; any thread of TensorFlow may run its operations
  };
  Kind kind = Kind::kThread;
  std::int64_t run = 0;  // kGraph: TensorFlow's number for this run of the graph
};

// Keeps the bringers of each bucket: the threads that are expected to contribute next. They are the living threads that
// collected the bucket's results in its last rounds. If none of those lives, they are the threads that contributed. A
// rank cannot contribute to a bucket while all its bringers wait. This is exact if each bucket has one thread. It is
// not exact if threads hand buckets to each other, or wait by other means than ours. So a process in which nothing has
// happened for long is judged as a whole.
//
// One object serves all process sets of a process, because a thread that waits in one of them cannot contribute in the
// others. All functions are thread-safe. The mutex guards all members. No other lock is taken while it is held.
class PossibleArrivals {
 public:
  // A thread, or a set of TensorFlow graphs that run one after the other.
  struct Bringer {
    std::atomic<bool> lives{true};
    Time waits_since = kNever;      // start of its wait for a round or in a flush; kNever: it does not wait
    Time parked_since = kNever;     // start of its wait in one of Horovod's collectives, if the front end tells
    Time polled = kNever;           // when it last polled such a collective that had not finished
    Time polls_since = kNever;      // start of a series of such polls at short intervals
    const void* flushes = nullptr;  // the engine in whose flush it waits, or null
    bool graphs = false;
  };

  struct Graph;  // the buckets to which one run of a graph contributes

  struct Thresholds {
    // A wait for a round or in a flush counts after this time. Most rounds end in a few of Horovod's cycles, each 1 ms,
    // and the others need not hear of those waits. If nobody else comes, the job stands still for this time.
    Time waiting = std::chrono::milliseconds(5);
    // A wait for one of Horovod's collectives counts after this time. An ordinary collective ends sooner, and a rank in
    // one is not out of training. If the rank does not come for long, the others lose this time.
    Time parked = std::chrono::milliseconds(100);
    Time silence = std::chrono::seconds(1);  // a process without any event for this long is judged as a whole
  };

  // Horovod's own collectives, as far as the engine knows of them.
  struct Foreign {
    Time since = kNever;  // since when one has been outstanding; kNever: none is
    bool told = false;    // the front end tells which threads wait for one (ForeignWait) or poll one (Polled)
  };

  // The buckets of one engine to which this rank cannot contribute at present.
  struct Away {
    BucketSet absent;          // their bringers are out of training: in a flush, or in one of Horovod's collectives
    BucketSet waiting;         // their bringers wait
    bool blocked = false;      // all bringers of this process wait or are out of training; never set because of silence
    std::string elsewhere;     // Report::elsewhere
    Time until{0};             // the answer holds until then if no event comes before
    std::uint64_t events = 0;  // events() at the time of the answer
    bool operator==(const Away& other) const {
      return absent == other.absent && waiting == other.waiting && blocked == other.blocked &&
             elsewhere == other.elsewhere;
    }
  };
  // Judges the buckets of `engine`. `flushes`: a thread waits in a flush of this engine.
  Away Look(const void* engine, Time now, const Foreign& foreign, bool flushes, const Thresholds& thresholds) const;

  // A wait for a round or in a flush. It includes the reduction: it ends when the thread or graph has the result.
  struct Wait {
    Time since = kNever;
    const void* engine = nullptr;  // the engine of the bucket or flush
    std::string what;              // what is waited for, in words
    bool ends = false;             // it waits until all ranks have ended
  };
  // Returns the longest wait in this process. A wait for the end of all ranks counts only if there is no other wait.
  // `since` is kNever if there is no wait.
  Wait LongestWait() const;
  // While this object lives, the calling thread is in a flush. The reductions of the flush are included.
  class FlushWait {
   public:
    FlushWait(std::shared_ptr<PossibleArrivals> bringers, const void* engine, bool ends, Time now);
    ~FlushWait();
    FlushWait(const FlushWait&) = delete;
    FlushWait& operator=(const FlushWait&) = delete;

   private:
    const std::shared_ptr<PossibleArrivals> owner_;
    std::list<Wait>::iterator wait_;
  };

  // While this object lives, the calling thread waits in one of Horovod's collectives.
  class ForeignWait {
   public:
    ForeignWait(std::shared_ptr<PossibleArrivals> bringers, Time now);
    ~ForeignWait();
    ForeignWait(const ForeignWait&) = delete;
    ForeignWait& operator=(const ForeignWait&) = delete;

   private:
    const std::shared_ptr<PossibleArrivals> owner_;
    const std::shared_ptr<Bringer> self_;
    Time before_ = kNever;  // start of the wait around this one, or kNever
  };
  // The calling thread has polled one of Horovod's collectives. `over`: it has finished.
  void Polled(bool over, Time now);

  // Counts the events that may change the answer of Look. The end of a thread is not counted.
  std::uint64_t events() const { return events_; }

  // The calling thread begins to wait in a flush of `engine`. Returns its bringer; any thread may give it to EndFlush.
  std::shared_ptr<Bringer> BeginFlush(const void* engine, Time now);
  void EndFlush(Bringer& bringer, Time now);

  // The records of one bucket of one engine. SharedBucket has one as a member.
  class Bucket {
   public:
    Bucket(std::shared_ptr<PossibleArrivals> bringers, const void* engine, std::string name);
    ~Bucket();
    Bucket(const Bucket&) = delete;
    Bucket& operator=(const Bucket&) = delete;

    // Records a contribution. `round`: how many rounds of the bucket have ended on this rank.
    void Arrive(const Caller& caller, Round round, Time now);
    // Open: the contribution now waits for a round to close. Settle: its round has begun. Done: it has its result.
    void Open(Time now);
    void Settle();
    void Done(Round round, Time now);
    // The calling thread begins or ends a wait for the result. `collects`: it takes the result, and becomes a bringer.
    void BeginWait(Time now);
    void EndWait(bool collects, Round round, Time now);
    // The calling thread will contribute next. It becomes a bringer, although other threads contributed before.
    void Claim(Round round);
    // Returns since when a caller has waited without BeginWait: a blocked thread or a graph. kNever if none does.
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
    bool outstanding_ = false;  // a contribution has no result yet
    bool open_ = false;         // its round has not begun
    Time arrived_ = kNever;     // when the last contribution came
    Round round_ = 0;           // the round that was open then
    std::vector<Visit> arrivals_;
    std::vector<Visit> collections_;
    std::vector<std::shared_ptr<Bringer>> waiters_;
    Time waited_since_ = kNever;        // since when waiters_ has not been empty
    std::shared_ptr<Bringer> blocked_;  // the waiter of kind kBlockedThread, or null
    std::shared_ptr<Graph> graph_;      // the graph that contributes to this bucket, or null
    Time free_ = kNever;                // when the last result was collected
    std::array<Time, 8> intervals_{};   // from a result to the next contribution, in the last rounds
    std::size_t next_interval_ = 0;
    mutable bool left_out_ =
        false;  // the present interval is not recorded: the process seemed to wait for Horovod in it
  };

 private:
  std::shared_ptr<Bringer> Self();
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
  std::shared_ptr<Bringer> all_graphs_;  // the bringer of all graphs that have never run at the same time
  int open_ = 0;                         // how many buckets have a contribution whose round has not begun
  int waiting_ = 0;                      // how many bringers wait
  std::set<const Bringer*> parked_;      // threads in one of Horovod's collectives
  Time active_{0};                       // when a thread last contributed, collected a result, or left a flush
};

}  // namespace horovod_partial
