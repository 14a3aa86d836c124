// Who in this process can still bring something to which bucket (docs/protocol.md, rule 7).
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

#include "core/message.h"
#include "core/types.h"

namespace horovod_partial {

// Who brings an arrival, and how it waits for the result.
struct Caller {
  enum class Kind : std::uint8_t {
    kThread,         // the calling thread, which waits later, or asks now and then
    kBlockedThread,  // the calling thread, which does nothing else until the result is there
    kGraph,          // a graph of TensorFlow, whose threads are anybody's
  };
  Kind kind = Kind::kThread;
  std::int64_t run = 0;  // kGraph: TensorFlow's number for what runs the graph
};

// The bringers of a bucket are the living threads that collected its results in its last rounds; where none of those
// lives, the ones that arrived. A rank cannot come to a bucket while all its bringers wait. That is exact where each
// bucket has its thread. Where buckets are handed from thread to thread, or nobody waits in a wait of ours, a rank that
// has done nothing for long is judged as a whole.
//
// One object serves all process sets of a process, since a thread that waits in one of them cannot arrive in the
// others. Any thread may call it. Its mutex guards everything in it and is the innermost of ours.
class Bringers {
 public:
  // Somebody who brings: a thread, or the graphs that are run one after the other.
  struct Bringer {
    std::atomic<bool> lives{true};
    Time waits_since = kNever;      // for a round to close, or in a flush
    Time parked_since = kNever;     // in a collective of Horovod's, as the front end tells
    Time polled = kNever;           // when it last asked in vain whether such a collective is over, likewise
    Time polls_since = kNever;      // and since when it has asked at short intervals
    const void* flushes = nullptr;  // the engine whose flush it waits in
    bool graphs = false;
  };

  struct Graph;  // buckets that one run of a graph brings to

  struct Thresholds {
    Time waiting = std::chrono::milliseconds(5);   // a wait this long counts
    Time parked = std::chrono::milliseconds(100);  // a collective of Horovod's, outstanding this long, does
    Time silence = std::chrono::seconds(1);        // a process that has done nothing this long is judged as a whole
  };

  // What is known of collectives of Horovod's own.
  struct Foreign {
    Time since = kNever;  // since when one has been outstanding
    bool told = false;    // the front end tells which thread waits for one (ForeignWait), or asks (Polled)
  };

  // To which of an engine's buckets this rank cannot come.
  struct Away {
    BucketSet absent;   // because those who bring to them are out of training: in a flush, or a collective of Horovod's
    BucketSet waiting;  // because they wait
    bool blocked = false;      // all that bring anything wait, or are out of training; never because of silence
    std::string elsewhere;     // Report::elsewhere
    Time until{0};             // it may be another answer from then on, if nothing happens before
    std::uint64_t events = 0;  // how often something had happened
    bool operator==(const Away& other) const {
      return absent == other.absent && waiting == other.waiting && blocked == other.blocked &&
             elsewhere == other.elsewhere;
    }
  };
  // `flushes`: a thread waits in a flush of this engine.
  Away Look(const void* engine, Time now, const Foreign& foreign, bool flushes, const Thresholds& thresholds) const;

  // A wait of ours, as long as a thread or a graph is in it: also while its round is being reduced.
  struct Wait {
    Time since = kNever;
    const void* engine = nullptr;  // in whose bucket or flush
    std::string what;              // in words
    bool ends = false;             // for all ranks to come to their ends
  };
  // The longest one in this process; at the end of the process only if there is no other. `since` is kNever if there is
  // none.
  Wait LongestWait() const;
  // The calling thread is in a flush from here on, also while the flush's own rounds are reduced.
  class FlushWait {
   public:
    FlushWait(std::shared_ptr<Bringers> bringers, const void* engine, bool ends, Time now);
    ~FlushWait();
    FlushWait(const FlushWait&) = delete;
    FlushWait& operator=(const FlushWait&) = delete;

   private:
    const std::shared_ptr<Bringers> owner_;
    std::list<Wait>::iterator wait_;
  };

  // The calling thread waits in a collective of Horovod's from here on.
  class ForeignWait {
   public:
    ForeignWait(std::shared_ptr<Bringers> bringers, Time now);
    ~ForeignWait();
    ForeignWait(const ForeignWait&) = delete;
    ForeignWait& operator=(const ForeignWait&) = delete;

   private:
    const std::shared_ptr<Bringers> owner_;
    const std::shared_ptr<Bringer> self_;
    Time before_ = kNever;  // of the wait in which this one is
  };
  // The calling thread has asked whether a collective of Horovod's is over.
  void Polled(bool over, Time now);

  // How often something has happened that may change an answer, but for the end of a thread.
  std::uint64_t events() const { return events_; }

  // The calling thread waits in a flush of that engine. Returns it, for whoever ends the flush.
  std::shared_ptr<Bringer> BeginFlush(const void* engine, Time now);
  void EndFlush(Bringer& bringer, Time now);

  // What is known of one bucket of one engine; the bucket has it as a member.
  class Bucket {
   public:
    Bucket(std::shared_ptr<Bringers> bringers, const void* engine, std::string name);
    ~Bucket();
    Bucket(const Bucket&) = delete;
    Bucket& operator=(const Bucket&) = delete;

    // Somebody brings something; `round` counts the bucket's rounds.
    void Arrive(const Caller& caller, Round round, Time now);
    // What has been brought waits for a round to close, from now on; then it does not any more; then it has its result.
    void Open(Time now);
    void Settle();
    void Done(Round round, Time now);
    // The calling thread waits for the result, and stops waiting. `collects`: it takes the result for itself.
    void BeginWait(Time now);
    void EndWait(bool collects, Round round, Time now);
    // The calling thread is about to bring something, whoever did before.
    void Claim(Round round);
    // Since when a caller that does not wait in a wait of ours has been waiting, or kNever.
    Time UnattendedSince() const;

   private:
    friend class Bringers;
    void AddWaiter(const std::shared_ptr<Bringer>& waiter, Time now);
    Time WaitsSince() const;
    struct Visit {
      std::shared_ptr<Bringer> bringer;
      Round round;
    };
    static void Add(std::vector<Visit>& visits, const std::shared_ptr<Bringer>& bringer, Round round);
    void Collect(const std::shared_ptr<Bringer>& bringer, Round round, Time now);
    void ArriveInRun(std::int64_t run, Time now);

    const std::shared_ptr<Bringers> owner_;
    const void* const engine_;
    const std::string name_;
    bool outstanding_ = false;  // brought, and without a result
    bool open_ = false;         // and its round has not begun
    Time arrived_ = kNever;     // when it was brought
    Round round_ = 0;           // and for which round
    std::vector<Visit> arrivals_;
    std::vector<Visit> collections_;
    std::vector<std::shared_ptr<Bringer>> waiters_;
    Time waited_since_ = kNever;        // since when somebody has been among those
    std::shared_ptr<Bringer> blocked_;  // of Caller::Kind::kBlockedThread
    std::shared_ptr<Graph> graph_;      // which brings to this bucket, or null
    Time free_ = kNever;                // when the last result was collected
    std::array<Time, 8> intervals_{};   // between a result and what was brought next, in the last rounds
    std::size_t next_interval_ = 0;
    mutable bool left_out_ =
        false;  // this interval does not count: the process was taken to wait for Horovod meanwhile
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
  std::shared_ptr<Bringer> all_graphs_;  // brings for graphs that have never run at the same time
  int open_ = 0;                         // buckets that are
  int waiting_ = 0;                      // bringers that do
  std::set<const Bringer*> parked_;      // threads in a collective of Horovod's
  Time active_{0};                       // when anybody last arrived or collected
};

}  // namespace horovod_partial
