// Rank 0's part of a cycle: it reads reports, closes rounds, and puts decisions into Horovod's tables and responses.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "attach/horovod.h"
#include "core/rounds/coordinator.h"

namespace horovod_partial::attach {

std::string Failed(Rank rank);

// Records that the heartbeat monitor of this process has just logged a long wait. The monitor says more than the
// coordinator can (docs/protocol.md, rule 14), so Coordination does not log the wait again. For any thread.
void NoteLoggedWait();

// Connects the coordinator to Horovod. All functions but statistics() are called by the background thread.
class Coordination {
 public:
  explicit Coordination(hvd::Controller& controller)
      : controller_(controller), size_(controller.GetSize()), joined_(Index(size_), false), coordinator_(size_) {}

  // `for_all_ranks`: true for the process set of all ranks. Only the coordinator of that set looks for deadlocks.
  void Begin(hvd::HorovodGlobalState& state, bool for_all_ranks);
  bool WantsCycle(Time now) const { return coordinator_.NextDeadline() <= now; }
  // Logs a warning if ranks wait long for rounds or flushes, because Horovod's stall inspector sees neither. Leaves out
  // waits that the heartbeat monitor has logged. Returns true if a wait is so long that the job must end by the
  // inspector's settings.
  bool WatchWaits(Time now);

  // Reads the reports in the other ranks' request lists, and removes them, because Horovod would mistake a report for
  // the request of a tensor. Returns true if another rank has failed and asks for a shutdown.
  bool TakeReports(std::vector<hvd::RequestList>& ready, Time now);
  // Records that a rank has failed, and why. The next call of Decide adds a message that tells all ranks.
  void NoteFailure(Rank rank, const std::string& failure);
  // Returns what rank 0 decides in this cycle: which rounds close, and which errors all ranks get. `own` is the report
  // of this rank. If `own` is null, no round closes. `joined`: true if this rank has joined.
  std::vector<Closing> Decide(const Report* own, bool joined, Time now);
  // Returns the requests of a closed round: one for each rank, even for a joined rank, because Horovod reads the device
  // of a rank from its request. The requests agree with each other, so Horovod never refuses them.
  std::vector<hvd::Request> RowOf(const Closing& closing) const;
  // Hands the requests of closed rounds to Horovod, which reduces them in this cycle on every rank.
  void Add(std::vector<Closing> closings, std::vector<std::vector<hvd::Request>> rows,
           std::vector<std::string>& ready_to_reduce);

  // Puts the decisions on rounds, and on the micro-batches that ranks may begin, into the responses to all ranks.
  void Enclose(hvd::ResponseList& responses);
  // Adds a response that says why this rank has failed. Returns false if `responses` tells of a failed rank already.
  bool AddFailure(const std::string& failure, hvd::ResponseList& responses);
  void EndCycle() { closed_.clear(); }

  const Declaration& declaration(const std::string& bucket) const { return coordinator_.declaration(bucket); }

  // What the coordinator has counted, by the names of buckets. Any thread may ask for the counts.
  using Statistics = std::map<std::string, Coordinator::Counts>;
  Statistics statistics() const;

 private:
  void Observe(Rank rank, const Report& report, Time now);
  std::string LeaveOutZerosElsewhere(Closing& closing, const std::string& refusal) const;

  hvd::Controller& controller_;
  const int size_;
  hvd::HorovodGlobalState* state_ = nullptr;
  std::vector<bool> joined_;               // for each rank: true if it has joined
  std::map<Rank, int> join_devices_;       // for each joined rank: the device of the zeros that it contributes
  std::string failures_;                   // which ranks have failed, and why; empty once Decide has reported it
  std::vector<Grants> grants_;             // which ranks may begin which micro-batches; empty if unchanged
  std::map<std::string, Closing> closed_;  // the closings of this cycle, by the buckets' names in messages
  Time last_watch_{0};
  std::string warned_;

  mutable std::mutex mutex_;  // guards the coordinator and its statistics; no other lock is taken while it is held
  Coordinator coordinator_;
};

}  // namespace horovod_partial::attach
