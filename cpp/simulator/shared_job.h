// A job with work sharing, in simulated time: how long do its updates take?
#pragma once

#include <cstddef>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "core/merging/merging_plan.h"
#include "core/rounds/work_sharing.h"
#include "core/values/types.h"
#include "simulator/job.h"

namespace horovod_partial {

// What the ranks do in each update, and how long that takes. Times are in seconds.
struct SharedJobConfig {
  int ranks = 1;
  int passes = 1;  // the number of micro-batches of an update, divided by the number of ranks
  int updates = 1;
  double compute = 0;  // the time of a micro-batch without its delay; above 0
  // The delay of a micro-batch is the sum of its delays in `in_first`, `in_each` and `in_own`.
  std::vector<double> in_first;  // [update * ranks + rank]: the delay of the first micro-batch of the rank
  std::vector<double> in_each;   // [update * ranks + rank]: the delay of each micro-batch of the rank
  std::vector<double> in_own;    // [update * micro-batches + micro-batch]: a delay that the micro-batch has on any rank
  std::vector<Gradient> messages;  // `ready` counts from the start of the last micro-batch's compute
  LinearCost cost;                 // the cost of a reduction
  double cycle = 0;                // the least time from one negotiation to the next
};

struct SharedJobResult {
  std::vector<double> ends;  // [update]: when the update ended
  std::vector<int> made;     // [update * ranks + rank]: the number of micro-batches that the rank has made
  // [update]: how long the micro-batches would take by a list schedule that knows all times. The longest micro-batch
  // goes first, to the rank that would end it first. If `in_own` is 0 throughout, no schedule is shorter.
  std::vector<double> bounds;
};

// Simulates one job in one thread. The classes that deal out micro-batches in a real job (Ledger, OwnShare) run here
// too, driven by events. A rank begins a micro-batch as soon as it may. A rank that may begin none waits for the next
// cycle in which the coordinator grants it a micro-batch. In a micro-batch the delay comes first, then the compute. A
// message is ready when the micro-batch that ends last has computed the message's gradients. A negotiation takes no
// time, as in Job.
//
// In the first update of a real job each rank makes its own micro-batches. Here the first update is like all others.
class SharedJob {
 public:
  explicit SharedJob(SharedJobConfig config);

  // Runs the job to its end. To be called once.
  SharedJobResult Run();

 private:
  struct Worker {
    OwnShare share;
    int done = 0;
    bool computes = false;
  };
  using End = std::pair<Time, Rank>;  // when a micro-batch ends, and on which rank

  Worker& At(Rank rank) { return workers_[Index(rank)]; }
  // Returns the index of a delay of this update, in a table with `columns` columns.
  std::size_t Cell(int column, int columns) const {
    return static_cast<std::size_t>(update_) * static_cast<std::size_t>(columns) + static_cast<std::size_t>(column);
  }
  void Begin(Rank rank);
  void Finish();
  Time NextNegotiation() const;
  void Observe();
  void Negotiate();
  Time Reduced() const;
  double ListSchedule() const;

  const SharedJobConfig config_;
  const Time cycle_;
  Ledger ledger_;
  std::vector<Worker> workers_;

  int update_ = 0;
  Time now_{0};
  Time start_{0};         // when the update of work sharing began; a cycle begins at the same time
  Time negotiated_{0};    // when the last cycle began
  Time wanted_ = kNever;  // since when a rank has something to report, or kNever
  std::priority_queue<End, std::vector<End>, std::greater<>> ends_;  // when the ranks' micro-batches end
};

}  // namespace horovod_partial
