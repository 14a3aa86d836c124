// The coordinator's half of the round protocol (docs/protocol.md): it decides which rounds close.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/rounds/bucket_state.h"
#include "core/rounds/message.h"
#include "core/rounds/waits.h"
#include "core/values/types.h"

namespace horovod_partial {

// Each process set has one coordinator, on its rank 0. Only one thread calls it (Horovod's background thread, a test or
// the simulator). The coordinator takes no lock, reads no clock and never blocks. In each cycle in which the ranks
// negotiate, Observe is called for each rank, then Decide once.
//
// A bucket has one open round at a time:
//               (no round yet) --all active ranks arrived--> round 1 open --closed--> round 2 open --closed--> ...
// Decide returns the rounds that close, in this order: by policy, then at most one by liveness (no missing rank can
// arrive), then the last rounds of buckets, then rounds of a flush. Each kind is in the order of the buckets' names.
class Coordinator {
 public:
  // How long ranks that have ended wait for ranks that are blocked in a collective of Horovod. That collective needs
  // the ended ranks and will never run. So after this time the ended ranks leave, and the others get an error.
  static constexpr Time kAbandonAfter = std::chrono::seconds(10);

  // Ranks that have waited for each other for this long count as waiting for ever, unless the user sets another time.
  static constexpr Time kDeadlockAfter = std::chrono::seconds(20);

  explicit Coordinator(int size);

  // Sets how long ranks must have waited for each other before all their waits fail; kNever, the default, turns the
  // check off. Only the process set of all ranks has the check: in other process sets, ranks outside may end a wait.
  void SetDeadlockAfter(Time wait) { deadlock_after_ = wait; }

  void Observe(Rank rank, const Report& report, Time now);
  // Records which ranks are in hvd.join(). Horovod sends zeros for these ranks. The coordinator forgets their arrivals.
  // The ranks report these arrivals again when the join is over.
  void SetJoined(const std::vector<bool>& joined);
  std::vector<Closing> Decide(Time now);

  // The micro-batches that each rank may begin, for each bucket for which the last Decide has changed them.
  const std::vector<Grants>& grants() const { return grants_; }

  // The error with which all waits fail, if the last Decide has found that all ranks wait for each other (in one
  // process set or across several). Otherwise it is empty.
  const std::string& deadlock() const { return deadlock_; }

  // Returns when the longest wait for an open round or in a flush began, or kNever. Ranks that have ended do not count:
  // they may have to wait long for ranks that train.
  Time OldestWait() const;

  // Returns the time when Decide must be called again even if no rank has news, because a grace period or another limit
  // ends at that time. Time::min() stands for the next cycle. kNever means that no call is needed.
  Time NextDeadline() const;

  // declaration returns what the ranks agreed on for `bucket`. device returns the device of the tensor of `rank`. The
  // bucket must have had a round. A bucket that has ended is known until the next Observe.
  const Declaration& declaration(const std::string& bucket) const { return *buckets_.at(bucket).declaration; }
  int device(const std::string& bucket, Rank rank) const;

  // Called when a round is refused, and so fails on all ranks. Afterwards it is as if the bucket had never been used.
  void Forget(const std::string& bucket) {
    buckets_.erase(bucket);
    unflushed_.erase(bucket);
  }

  // Returns a text with a line for each wait that began at `oldest` or before: which round or flush waits for whom.
  // Horovod's stall inspector cannot see waits for rounds and flushes. If `explained` is set, heartbeats have logged
  // the waits of threads (docs/protocol.md, rule 14). Then the text has only waits that heartbeats do not see: waits
  // for the end of a bucket, and waits of ended ranks.
  std::string DescribeWaits(Time oldest, bool explained) const {
    const bool seen = explained && flushing_since_ != kNever;
    return horovod_partial::DescribeWaits(levels_, buckets_, seen ? kNever : flush_since_, oldest, !explained);
  }

  // What the coordinator has counted of a bucket.
  struct Counts {
    std::vector<double> offsets;  // for each rank: how many seconds it arrived after the first rank, on average
    std::optional<std::int64_t> unconnected{};  // PartialReduce: how often the last groups did not connect all ranks
  };
  std::map<std::string, Counts> Counted() const;

 private:
  friend class CoordinatorPeer;  // lets tests read the ledger of micro-batches

  // Verdict returns why the open round must close now. It returns nothing if the round stays open, or has no arrival.
  std::optional<Closing::Reason> Verdict(const BucketState& bucket, Time now) const;
  std::optional<Closing::Reason> VerdictOnUpdate(const BucketState& bucket) const;
  bool Comes(Rank rank) const { return !levels_[Index(rank)].joined && !levels_[Index(rank)].leaves; }
  bool NobodyComes() const;
  bool NobodyWillDeclare(const BucketState& bucket) const;
  Report::Flush FlushOfAll() const;
  bool OnlyBlockedRanksAreLeft() const;
  bool RanksWaitForEachOther() const;
  bool AnythingRuns() const;

  BucketState& Find(const std::string& name);
  void BeginFlush(Report::Flush flush);
  void ForgetEnded();
  void Grant(Time now);
  Closing End(const std::string& name, BucketState& bucket, Time now);
  std::vector<Closing> RefuseAll(Time now);
  void Begin(BucketState& bucket, Closing& closing);
  Closing Close(const std::string& name, BucketState& bucket, Closing::Reason reason, Partition groups, Time now);
  Closing Close(const std::string& name, BucketState& bucket, Closing::Reason reason, Time now) {
    return Close(name, bucket, reason, bucket.GroupsFor(reason), now);
  }

  const int size_;
  Time deadlock_after_ = kNever;
  std::vector<RankLevel> levels_;  // what each rank reports about itself
  BucketStates buckets_;
  std::vector<Grants> grants_;
  std::vector<std::string> ended_;  // the buckets that ended in the last Decide
  // The kind of the flush that all ranks are in, and the buckets that have closed no round in this flush yet.
  Report::Flush flush_ = Report::Flush::kNone;
  std::set<std::string> unflushed_;
  Time flush_since_ = kNever;     // since when some rank has been in a flush, or has ended
  Time flushing_since_ = kNever;  // since when some rank has been in a flush without having ended
  std::string deadlock_;
  Time stuck_since_ = kNever;       // since when no rank can arrive, and at least one has ended
  Time deadlocked_since_ = kNever;  // since when all ranks have waited for each other
  bool again_ = false;              // true if Decide must be called in the next cycle, even if no rank has news
};

}  // namespace horovod_partial
