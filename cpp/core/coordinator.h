// Which rounds close now? The coordinator's half of the round protocol (docs/protocol.md).
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/auto_quorum.h"
#include "core/grace.h"
#include "core/message.h"
#include "core/ready_groups.h"
#include "core/types.h"

namespace horovod_partial {

// One for each process set, on its rank 0. Everything is driven from one thread (Horovod's background thread, a test or
// the simulator): no lock, no clock, no blocking. A negotiating cycle is one Observe for every rank, then one Decide.
//
// Per bucket, one round at a time:
//               (no round yet) --all active ranks arrived--> round 1 open --closed--> round 2 open --closed--> ...
// Within one Decide, closings are in the order of the buckets' names; at most one of them is by liveness.
class Coordinator {
 public:
  // Ranks that have ended stop waiting for others that are blocked for this long in a collective of Horovod's, which
  // needs the ended ones and will never run. They leave, and Horovod fails the others, as it does without us.
  static constexpr Time kAbandonAfter = std::chrono::seconds(10);

  // Ranks of which each waits for another one, for this long, will wait for ever, unless the user says how long.
  static constexpr Time kDeadlockAfter = std::chrono::seconds(20);

  explicit Coordinator(int size);

  // Where each rank has waited for another one for this long, what waits fails on all of them. For all ranks of a job:
  // in a part of it others may end a wait, and kNever, as at first, says that nobody judges.
  void SetDeadlockAfter(Time wait) { deadlock_after_ = wait; }

  void Observe(Rank rank, const Report& report, Time now);
  // Joined ranks (hvd.join) get no more data to send: Horovod sends zeros for them. What had arrived of them arrives
  // again when the join is over.
  void SetJoined(std::vector<bool> joined);
  std::vector<Closing> Decide(Time now);

  // By the last Decide: who may begin which micro-batches, where that has changed.
  const std::vector<Grants>& grants() const { return grants_; }

  // Not empty: by the last Decide the ranks wait for each other, in whatever process sets, and all their waits fail.
  const std::string& deadlock() const { return deadlock_; }

  // Since when the open round, or the flush, has been waiting that has waited longest, or kNever. Ranks that have come
  // to their end wait for others that may train for long, and do not count.
  Time OldestWait() const;

  // When Decide should be called again although no rank has news: the earliest end of a grace period or of a hold, or
  // kNever.
  Time NextDeadline() const;

  // What the ranks have agreed on for a bucket of which a round has been closed, and where a rank's tensor lies. Of a
  // bucket that has ended until the next Observe.
  const Declaration& declaration(const std::string& bucket) const { return *buckets_.at(bucket).declaration; }
  int device(const std::string& bucket, Rank rank) const;

  // A round has been refused: the bucket is as if it had never been used.
  void Forget(const std::string& bucket) {
    buckets_.erase(bucket);
    unflushed_.erase(bucket);
    ledgers_.erase(bucket);
  }

  // Ranks that a round or a flush waits for, as one line for each that has waited since `oldest` or before; empty if
  // there is none. Names what Horovod's stall inspector would.
  std::string DescribeWaits(Time oldest) const;

  // How far behind the first rank each rank arrives: mean over all rounds, in seconds, late arrivals included.
  struct Offsets {
    std::vector<double> total_seconds;
    std::vector<std::int64_t> count;
  };
  std::map<std::string, Offsets> ArrivalOffsets() const;

  // Of buckets whose groups form of ready ranks: how often the window of the last groups left ranks unconnected.
  std::map<std::string, std::int64_t> UnconnectedWindows() const;

 private:
  friend class CoordinatorPeer;  // by which tests change the quorum of a round that has just opened

  struct RankLevel {
    bool absent = false;   // from all buckets, also those that the rank has not used yet
    bool waiting = false;  // for a round, so that it comes to none of these buckets
    bool blocked = false;  // for certain
    bool leaves = false;
    std::string elsewhere;
    Report::Flush flush = Report::Flush::kNone;
  };
  // What the buckets of one kAuto policy have in common.
  struct Pace {
    AutoQuorum quorum;
    std::string bucket;                  // whose rounds it follows
    std::map<std::string, Round> since;  // closings of each other one since its last
  };
  struct Arrival {
    int gradients = 0;
    int work = 0;
    bool present = false;
    bool full = false;
    Time time{0};  // when the rank came, by its report's age: up to a reduction earlier than its report
    Time step{0};  // since this rank's arrival before
  };
  struct Bucket {
    std::optional<Declaration> declaration;  // set when round 0 has closed, and kept: a rank may declare later
    Rank declared_by = 0;                    // whose it is
    std::map<Rank, Declaration> declared;    // by ranks that have arrived since the last closing
    std::map<Rank, int> devices;             // of ranks that have declared
    Round round = 0;                         // the open one
    int quorum = 0;                          // that it needs, since round 0 has closed
    QuorumGuard::Why why = QuorumGuard::Why::kStart;
    std::vector<Arrival> arrivals;
    // By rank, as said in this cycle.
    std::vector<int> pending;   // gradients
    std::vector<int> late;      // late arrivals in what is pending
    std::vector<bool> running;  // the round before has not ended there
    std::vector<bool> retired;  // nobody is left there who would come
    std::vector<Report::Backlog> backlog;
    std::vector<bool> absent;    // the rank is out of training, as far as this bucket goes
    std::vector<bool> waiting;   // all who bring to it wait
    std::vector<int> late_seen;  // the largest since the last closing
    std::vector<Round> last_contribution;
    std::vector<Time> last_arrival;           // kNever: none yet
    std::optional<ReadyGroups> ready_groups;  // kReady
    Time retired_since = kNever;              // some rank has retired it, and not all
    Time first_arrival = kNever;              // of the open round
    Time last_first_arrival = kNever;         // of the round before
    Time satisfied = kNever;                  // since when the policy is, as Decide has seen it
    Time last_satisfied = kNever;
    Time closed = kNever;  // when the last round was
    GraceEstimator grace;
    Offsets offsets;

    const Policy& policy() const { return declaration->policy; }
    bool SharesWork() const;
    bool HasArrival() const;
    void FindFirstArrival();
    bool WantsEverybody() const;
    bool Running() const;
    bool Draining() const;
    bool Full() const;
    Time Grace() const;
    std::string Title(const std::string& name) const;
  };

  // Decisions, each a pure function of the state. None closes unless somebody has arrived.
  std::optional<Closing::Reason> Verdict(const Bucket& bucket, Time now) const;
  std::optional<Closing::Reason> VerdictOnUpdate(const Bucket& bucket) const;
  bool Comes(Rank rank) const { return !joined_[Index(rank)] && !levels_[Index(rank)].leaves; }
  bool NobodyComes() const;
  bool Satisfied(const Bucket& bucket) const;
  bool TooStale(const Bucket& bucket) const;
  bool MustWaitFor(const Bucket& bucket, Rank rank) const;
  bool NobodyCanCome(const Bucket& bucket) const;
  bool NobodyWillDeclare(const Bucket& bucket) const;
  bool EverybodyArrived(const Bucket& bucket) const;
  bool Absent(const Bucket& bucket, Rank rank) const { return joined_[Index(rank)] || bucket.absent[Index(rank)]; }
  bool CannotCome(const Bucket& bucket, Rank rank) const { return Absent(bucket, rank) || bucket.waiting[Index(rank)]; }
  Report::Flush FlushOfAll() const;
  bool OnlyBlockedRanksAreLeft() const;
  bool RanksWaitForEachOther() const;
  bool AnythingRuns() const;
  bool Uses(Rank rank) const;
  bool Ends(const Bucket& bucket) const;
  std::string DisagreementOf(const Bucket& bucket) const;
  std::string FirstDifference() const;
  // Whether ranks wait in round 0 of other buckets than each other.
  bool WaitForTheSameElsewhere() const;
  std::string DescribeDeadlock() const;
  std::string WaitOf(Rank rank) const;
  std::vector<std::string> DeclaredBy(Rank rank) const;

  std::vector<bool> Active(const Bucket& bucket) const;
  std::vector<Rank> InOrderOfArrival(const Bucket& bucket) const;
  Closing::Contribution ContributionOf(const Bucket& bucket, Rank rank) const;
  Partition GroupsFor(Bucket& bucket, Closing::Reason reason) const;

  AutoQuorum* PaceSetBy(const std::string& name, const Bucket& bucket);
  void Follow(const std::string& name, Bucket& bucket, const std::vector<bool>& on_time, Time now);
  static std::size_t Index(Rank rank) { return static_cast<std::size_t>(rank); }
  Bucket& Find(const std::string& name);
  void BeginFlush(Report::Flush flush);
  void ForgetEnded();
  void Grant(Time now);
  Closing End(const std::string& name, Bucket& bucket, Time now);
  std::vector<Closing> RefuseAll(Time now);
  void RecordOffset(Bucket& bucket, Rank rank, Time offset);
  void Begin(Bucket& bucket, Closing& closing);
  Partition FormGroups(Bucket& bucket, Time now);
  Closing Close(const std::string& name, Bucket& bucket, Closing::Reason reason, Partition groups, Time now);
  Closing Close(const std::string& name, Bucket& bucket, Closing::Reason reason, Time now) {
    return Close(name, bucket, reason, GroupsFor(bucket, reason), now);
  }

  const int size_;
  Time deadlock_after_ = kNever;
  std::vector<bool> joined_;
  std::vector<RankLevel> levels_;
  std::map<std::string, Bucket> buckets_;
  std::map<std::string, Pace> paces_;      // by the policy in words
  std::map<std::string, Ledger> ledgers_;  // by the bucket that keeps the grants
  std::vector<Grants> grants_;
  std::vector<std::string> ended_;  // by the last Decide
  // All ranks flush, or leave: buckets that have had no closing since.
  Report::Flush flush_ = Report::Flush::kNone;
  std::set<std::string> unflushed_;
  Time flush_since_ = kNever;     // since when some rank has waited in a flush
  Time flushing_since_ = kNever;  // the same, of ranks that have not come to their end
  std::string deadlock_;
  Time stuck_since_ = kNever;       // since when only blocked ranks are left
  Time deadlocked_since_ = kNever;  // since when ranks wait for each other
  bool again_ = false;              // the last Decide left something for the next, which no news will announce
};

}  // namespace horovod_partial
