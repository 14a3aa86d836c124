// Decides which rounds close. The coordinator's half of the round protocol (docs/protocol.md).
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/quorum/auto_quorum.h"
#include "core/rounds/bucket_state.h"
#include "core/rounds/message.h"
#include "core/rounds/waits.h"
#include "core/values/types.h"

namespace horovod_partial {

// Each process set has one, on its rank 0. One thread drives it (Horovod's background thread, a test or the simulator):
// it takes no lock, reads no clock and never blocks. A negotiating cycle is an Observe for each rank, then one Decide.
//
// Per bucket, one round at a time:
//               (no round yet) --all active ranks arrived--> round 1 open --closed--> round 2 open --closed--> ...
// Decide puts closings by policy first, then at most one by liveness, then ends of buckets, then those of a flush. Each
// kind is in the order of the buckets' names.
class Coordinator {
 public:
  // Ranks that have ended wait this long for others that are blocked in one of Horovod's collectives. That collective
  // needs them and will never run, so they leave then, and Horovod fails the others, as it does without us.
  static constexpr Time kAbandonAfter = std::chrono::seconds(10);

  // Ranks that have waited for each other for this long will wait for ever, unless the user sets another time.
  static constexpr Time kDeadlockAfter = std::chrono::seconds(20);

  explicit Coordinator(int size);

  // Sets how long ranks must have waited for each other before all their waits fail. Only for the process set of all
  // ranks: in a smaller one, other ranks may end a wait. kNever, the default, turns the check off.
  void SetDeadlockAfter(Time wait) { deadlock_after_ = wait; }

  void Observe(Rank rank, const Report& report, Time now);
  // Joined ranks (hvd.join) contribute nothing: Horovod sends zeros for them. Their arrivals are forgotten here, and
  // reported again when the join is over.
  void SetJoined(const std::vector<bool>& joined);
  std::vector<Closing> Decide(Time now);

  // The grants that the last Decide has changed: which micro-batches each rank may begin.
  const std::vector<Grants>& grants() const { return grants_; }

  // Not empty: the last Decide has found that the ranks wait for each other, in one or in several process sets. All
  // their waits fail with this text.
  const std::string& deadlock() const { return deadlock_; }

  // Returns when the longest wait for an open round or in a flush began, or kNever. Ranks that have ended do not count:
  // they may wait for long for others that train.
  Time OldestWait() const;

  // Returns when Decide should be called again although no rank has news: the earliest end of a grace period, a hold or
  // another limit; Time::min() for the next cycle; kNever if there is no such time.
  Time NextDeadline() const;

  // What the ranks have agreed on for a bucket that has had a round, and the device of a rank's tensor. A bucket that
  // has ended is known until the next Observe.
  const Declaration& declaration(const std::string& bucket) const { return *buckets_.at(bucket).declaration; }
  int device(const std::string& bucket, Rank rank) const;

  // Call it when a round has been refused. The bucket then is as if it had never been used.
  void Forget(const std::string& bucket) {
    buckets_.erase(bucket);
    unflushed_.erase(bucket);
  }

  // Names the ranks that a round or a flush waits for: one line for each wait that began at `oldest` or before; empty
  // if there is none. It tells what Horovod's stall inspector would.
  std::string DescribeWaits(Time oldest) const {
    return horovod_partial::DescribeWaits(levels_, buckets_, flush_since_, oldest);
  }

  // How far behind the first rank each rank arrives: by rank, the sum in seconds and the number of all arrivals.
  struct Offsets {
    std::vector<double> total_seconds;
    std::vector<std::int64_t> count;
  };
  std::map<std::string, Offsets> ArrivalOffsets() const;

  // For buckets with groups of ready ranks: how often the last `window` groups did not connect all ranks.
  std::map<std::string, std::int64_t> UnconnectedWindows() const;

 private:
  friend class CoordinatorPeer;  // lets tests change the quorum of a round that has just opened

  // What the buckets of one kAuto policy share.
  struct Pace {
    AutoQuorum quorum;
    std::string bucket;                  // the bucket whose rounds the quorum follows
    std::map<std::string, Round> since;  // by other bucket: its closings since the last one of `bucket`
  };

  // Decisions: pure functions of the state. Verdict closes nothing in a bucket without an arrival.
  std::optional<Closing::Reason> Verdict(const BucketState& bucket, Time now) const;
  std::optional<Closing::Reason> VerdictOnUpdate(const BucketState& bucket) const;
  bool Comes(Rank rank) const { return !levels_[Index(rank)].joined && !levels_[Index(rank)].leaves; }
  bool NobodyComes() const;
  bool NobodyWillDeclare(const BucketState& bucket) const;
  Report::Flush FlushOfAll() const;
  bool OnlyBlockedRanksAreLeft() const;
  bool RanksWaitForEachOther() const;
  bool AnythingRuns() const;

  AutoQuorum* PaceSetBy(const std::string& name, const BucketState& bucket);
  void Follow(const std::string& name, BucketState& bucket, const std::vector<bool>& on_time, Time now);
  static std::size_t Index(Rank rank) { return static_cast<std::size_t>(rank); }
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
  std::vector<RankLevel> levels_;  // by rank
  BucketStates buckets_;
  std::map<std::string, Pace> paces_;  // by the policy's description
  std::vector<Grants> grants_;
  std::vector<std::string> ended_;  // buckets that ended in the last Decide
  // The kind of the flush that all ranks are in, and the buckets that have had no closing in it yet.
  Report::Flush flush_ = Report::Flush::kNone;
  std::set<std::string> unflushed_;
  Time flush_since_ = kNever;     // since when some rank has been in a flush, or has ended
  Time flushing_since_ = kNever;  // the same, without ranks that have ended
  std::string deadlock_;
  Time stuck_since_ = kNever;       // since when only blocked and ended ranks are left
  Time deadlocked_since_ = kNever;  // since when ranks wait for each other
  bool again_ = false;              // the last Decide has left work for the next cycle, although no rank will have news
};

}  // namespace horovod_partial
