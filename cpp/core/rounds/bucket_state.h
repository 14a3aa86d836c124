// What the coordinator knows of one bucket, and whether its open round may close.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/groups/ready_groups.h"
#include "core/quorum/policy.h"
#include "core/rounds/message.h"
#include "core/values/types.h"

namespace horovod_partial {

struct BucketState {
  struct Arrival {
    int gradients = 0;
    int work = 0;
    bool full = false;
    Time time{0};  // when the rank arrived; its report may come later, because no rank reports during a reduction
    Time step{0};  // the time between the last two arrivals of the rank
  };
  // What a rank's report of this cycle says of the bucket.
  struct Said {
    int pending = 0;       // the number of gradients in the pending sum
    int late = 0;          // the number of late arrivals in the pending sum
    bool running = false;  // true if the last round has not ended on the rank
    bool retired = false;  // true if the bucket's owner, such as an optimizer, is gone on the rank (rule 11)
    Report::Backlog backlog = Report::Backlog::kNone;
    bool absent = false;   // true if the rank is away from this bucket (rule 7)
    bool waiting = false;  // true if the rank cannot arrive because the threads that use the bucket wait
  };
  struct RankState {
    bool joined = false;
    Said said;
    std::optional<Arrival> arrival;  // the rank's arrival at the open round, if it has arrived
    std::optional<int> device;       // the device of the rank's tensor, if the rank has declared the bucket
    int late_seen = 0;               // the largest number of late arrivals in a report since the last round closed
    Round last_contribution = -1;
    Time last_arrival = kNever;  // when the rank last arrived; kNever if it has not arrived yet
    double offset_seconds = 0;   // how many seconds the rank was behind the first rank, summed over its arrivals
    std::int64_t arrivals = 0;   // the number of arrivals over which `offset_seconds` is summed

    bool Absent() const { return joined || said.absent; }
    bool CannotCome() const { return Absent() || said.waiting; }
    int arrived_gradients() const { return arrival ? arrival->gradients : 0; }
    void RecordOffset(Time offset);
  };

  std::vector<RankState> ranks;
  // What the ranks agreed on when round 0 closed. Kept for ranks that had joined, which declare the bucket later.
  std::optional<Declaration> declaration;
  Rank declared_by = 0;                     // the rank from which `declaration` came
  std::map<Rank, Declaration> declared;     // the declarations that came with arrivals since the last round closed
  Round round = 0;                          // the number of the open round
  std::optional<ReadyGroups> ready_groups;  // forms groups of ranks; set only under PartialReduce
  std::optional<Ledger> ledger;      // grants micro-batches; set under work sharing, in one bucket of an optimizer
  Time retired_since = kNever;       // since when the bucket's owner (Said::retired) is gone on some ranks
  Time first_arrival = kNever;       // when the first rank arrived at the open round
  Time last_first_arrival = kNever;  // when the first rank arrived at the last round
  // Since when the policy of the open round has been satisfied; kNever if it is not.
  Time satisfied = kNever;
  Time last_satisfied = kNever;
  Time closed = kNever;  // when the last round closed
  GraceEstimator grace;

  const Policy& policy() const { return declaration->policy; }
  RankState& At(Rank rank) { return ranks[Index(rank)]; }
  const RankState& At(Rank rank) const { return ranks[Index(rank)]; }
  int size() const { return static_cast<int>(ranks.size()); }

  // Questions that the coordinator asks before it closes a round. The answers depend on this bucket's state only.
  template <class Condition>
  bool Any(const Condition& condition) const {
    return std::any_of(ranks.begin(), ranks.end(), condition);
  }
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
  std::vector<bool> Active() const;
  std::vector<Rank> InOrderOfArrival() const;
};

using BucketStates = std::map<std::string, BucketState>;  // what the coordinator knows of each bucket, by its name

// What a rank reports about itself, and not about a single bucket.
struct RankLevel {
  bool absent = false;   // true if the rank is away from all buckets (rule 7), also from those that it has not used
  bool waiting = false;  // true if the rank waits for a round, so that it cannot arrive at any bucket
  bool blocked = false;  // true if all known threads of the rank wait or take no part in training
  bool leaves = false;
  std::string elsewhere;
  Report::Flush flush = Report::Flush::kNone;
  bool joined = false;
};

// Returns true if a rank has declared a bucket that a flush waits for.
bool Uses(const BucketStates& buckets, Rank rank);

}  // namespace horovod_partial
