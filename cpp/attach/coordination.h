// Rank 0's part of a cycle: it reads the reports, decides, and puts the decisions into Horovod's tables and responses.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "attach/horovod.h"
#include "core/rounds/coordinator.h"

namespace horovod_partial::attach {

std::string Failed(Rank rank);

// All functions but Statistics are called by the background thread.
class Coordination {
 public:
  Coordination(hvd::Controller& controller, int size)
      : controller_(controller), size_(size), joined_(static_cast<std::size_t>(size), false), coordinator_(size) {}

  // `state`: Horovod's. `for_all_ranks`: this is the process set of all ranks.
  void Begin(hvd::HorovodGlobalState& state, bool for_all_ranks);
  bool WantsCycle(Time now) const { return coordinator_.NextDeadline() <= now; }
  // Warns of long waits. Returns true if they are so long that the job ends, by the settings of Horovod's stall
  // inspector. That inspector sees no request of ours.
  bool WatchWaits(Time now);

  // Takes our reports out of the other ranks' messages, because Horovod would count them. Returns true if a rank fails.
  bool TakeReports(std::vector<hvd::RequestList>& ready, Time now);
  // The other ranks will be told that this one has failed.
  void NoteFailure(Rank rank, const std::string& failure);
  // Returns the closings of this cycle. `own`: the report of this rank; null if nothing is to be decided. `joined`:
  // this rank has joined.
  std::vector<Closing> Decide(const Report* own, bool joined, Time now);
  // Returns the requests for Horovod's response: one for each rank, also for joined ranks, because Horovod finds a
  // rank's device by the rank. The requests agree with each other, so Horovod never refuses them.
  std::vector<hvd::Request> RowOf(const Closing& closing) const;
  // Gives Horovod these rows. They are reduced in this cycle, on every rank.
  void Add(std::vector<Closing> closings, std::vector<std::vector<hvd::Request>> rows,
           std::vector<std::string>& ready_to_reduce);

  // Puts this cycle's decisions into the responses.
  void Enclose(hvd::ResponseList& responses);
  // Adds a response that carries why this rank has failed. Returns false if there is one already.
  bool AddFailure(const std::string& failure, hvd::ResponseList& responses);
  void EndCycle() { closed_.clear(); }

  const Declaration& declaration(const std::string& bucket) const { return coordinator_.declaration(bucket); }

  // Any thread: what the coordinator has counted, by bucket.
  struct Statistics {
    std::map<std::string, Coordinator::Offsets> offsets;
    std::map<std::string, std::int64_t> unconnected_windows;
  };
  Statistics statistics() const;

 private:
  void Observe(Rank rank, const Report& report, Time now);
  int OwnJoinDevice() const;
  std::string JoinRefusal(const std::string& bucket) const;

  hvd::Controller& controller_;
  const int size_;
  hvd::HorovodGlobalState* state_ = nullptr;
  std::vector<bool> joined_;               // by rank
  std::map<Rank, int> join_devices_;       // the device of each joined rank's zeros
  std::string failures_;                   // which ranks have failed, and why; empty once all are told
  std::vector<Grants> grants_;             // the grants decided in this cycle
  std::map<std::string, Closing> closed_;  // the closings decided in this cycle, by wire name
  Time last_watch_{0};
  std::string warned_;

  mutable std::mutex mutex_;  // held while the coordinator changes, or another thread reads; no lock is taken below it
  Coordinator coordinator_;
};

}  // namespace horovod_partial::attach
