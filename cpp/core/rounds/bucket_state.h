// What the coordinator knows of one bucket, and what follows from it for the open round.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/groups/ready_groups.h"
#include "core/quorum/grace.h"
#include "core/rounds/message.h"
#include "core/values/types.h"

namespace horovod_partial {

struct BucketState {
  struct Arrival {
    int gradients = 0;
    int work = 0;
    bool full = false;
    Time time{0};  // when the rank arrived, by the age in its report: up to a reduction earlier than the report
    Time step{0};  // time since the rank's arrival before this one
  };
  // What the rank's report of this cycle says of the bucket.
  struct Said {
    int pending = 0;       // gradients
    int late = 0;          // late arrivals in what is pending
    bool running = false;  // the last round has not ended there
    bool retired = false;  // no thread there will contribute any more
    Report::Backlog backlog = Report::Backlog::kNone;
    bool absent = false;   // the rank is out of training for this bucket
    bool waiting = false;  // all its bringers on the rank wait
  };
  struct RankState {
    bool joined = false;
    Said said;
    std::optional<Arrival> arrival;  // in the open round
    std::optional<int> device;       // where the tensor lies, if the rank has declared the bucket
    int late_seen = 0;               // the largest `late` since the last closing
    Round last_contribution = -1;
    Time last_arrival = kNever;  // kNever: none yet
    double offset_seconds = 0;   // how far behind the first rank it has arrived, the sum of all arrivals
    std::int64_t arrivals = 0;   // their number

    bool Absent() const { return joined || said.absent; }
    bool CannotCome() const { return Absent() || said.waiting; }
    int arrived_gradients() const { return arrival ? arrival->gradients : 0; }
    void RecordOffset(Time offset);
  };

  std::vector<RankState> ranks;
  std::optional<Declaration> declaration;  // set when round 0 has closed; kept, because a rank may declare later
  Rank declared_by = 0;                    // the rank whose declaration this is
  std::map<Rank, Declaration> declared;    // from arrivals since the last closing
  Round round = 0;                         // the open one
  int quorum = 0;                          // the quorum of the open round; set when round 0 has closed
  QuorumGuard::Why why = QuorumGuard::Why::kStart;
  std::optional<ReadyGroups> ready_groups;  // only with kReady
  std::optional<Ledger> ledger;             // only if the bucket keeps the grants of work sharing
  Time retired_since = kNever;              // since when some ranks have retired it, but not all
  Time first_arrival = kNever;              // first arrival of the open round
  Time last_first_arrival = kNever;         // first arrival of the last round
  Time satisfied = kNever;                  // since when Decide has found the policy satisfied; kNever: it is not
  Time last_satisfied = kNever;
  Time closed = kNever;  // when the last round closed
  GraceEstimator grace;

  const Policy& policy() const { return declaration->policy; }
  RankState& At(Rank rank) { return ranks[static_cast<std::size_t>(rank)]; }
  const RankState& At(Rank rank) const { return ranks[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(ranks.size()); }

  // Questions that the coordinator asks before it closes a round. The answers follow from the state alone.
  const Declaration* Known() const;
  bool SharesWork() const;
  bool HasArrival() const;
  bool EverybodyArrived() const;
  bool WantsEverybody() const;
  bool Running() const;
  bool Draining() const;
  bool Full() const;
  bool TooStale() const;
  bool Satisfied() const;
  bool NobodyCanCome() const;
  bool Ends() const;
  Time Grace() const;
  std::string Title(const std::string& name) const;
  std::string Disagreement() const;
  Closing::Contribution ContributionOf(Rank rank) const;

  void FindFirstArrival();
  Partition FormGroups(Time now);
  Partition GroupsFor(Closing::Reason reason);

 private:
  template <class Condition>
  bool Any(const Condition& condition) const;
  bool MustWaitFor(const RankState& rank) const;
  std::vector<bool> Active() const;
  std::vector<Rank> InOrderOfArrival() const;
};

using BucketStates = std::map<std::string, BucketState>;  // by name

// What a rank says of itself as a whole.
struct RankLevel {
  bool absent = false;   // out of training for all buckets, also those that the rank has not used yet
  bool waiting = false;  // waits for a round, and so cannot contribute to any bucket
  bool blocked = false;  // Report::blocked
  bool leaves = false;
  std::string elsewhere;
  Report::Flush flush = Report::Flush::kNone;
  bool joined = false;
};

// True if a rank has declared a bucket that a flush waits for.
bool Uses(const BucketStates& buckets, Rank rank);

}  // namespace horovod_partial
