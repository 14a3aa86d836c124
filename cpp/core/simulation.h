// A whole job in one thread: the coordinator and every rank's buckets, without collectives.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/bucket.h"
#include "core/coordinator.h"
#include "core/message.h"

namespace horovod_partial {

// Runs the very code that runs in a job; time and the order of events are the caller's. Buckets hold one number each.
class Simulation {
 public:
  struct Arrival {
    Bucket::Arrived outcome;
    std::vector<double> results;  // of a late arrival: what it gets at once, oldest first
  };

  Simulation(int size, Policy policy, Missed missed);

  Arrival Arrive(Rank rank, const std::string& bucket, double value);
  // One negotiating cycle: every rank reports, the coordinator decides, the rounds begin and are reduced. Throws
  // std::logic_error if a round of the cycle before has not been finished on every rank.
  std::vector<Closing> Cycle(Time now);
  // The callback of a round on one rank. The results for the arrival that waits there, oldest first; empty if none
  // does.
  std::vector<double> Finish(Rank rank, const std::string& bucket);
  // What a rank has missed, without an arrival; oldest first.
  std::vector<double> Collect(Rank rank, const std::string& bucket);

  void SetBlocked(Rank rank, bool blocked) { ranks_.at(Index(rank)).blocked = blocked; }
  void SetFlush(Rank rank, Report::Flush flush) { ranks_.at(Index(rank)).flush = flush; }
  void Join(Rank rank) { joined_.at(Index(rank)) = true; }

 private:
  struct Local {
    std::unique_ptr<Bucket> bucket;
    double value = 0;      // the application's memory, input and output of an arrival
    bool waiting = false;  // an arrival waits for the round
  };
  struct RankState {
    std::map<std::string, Local> buckets;
    bool blocked = false;
    Report::Flush flush = Report::Flush::kNone;
  };
  static std::size_t Index(Rank rank) { return static_cast<std::size_t>(rank); }
  Local& Find(Rank rank, const std::string& bucket);
  std::vector<double> Take(Local& local);

  const int size_;
  const Policy policy_;
  const Missed missed_;
  Coordinator coordinator_;
  std::vector<bool> joined_;
  std::vector<RankState> ranks_;
};

}  // namespace horovod_partial
