// A whole job in simulated time: how long do its iterations take?
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "core/groups/weights.h"
#include "core/merging/merging_plan.h"
#include "core/quorum/policy.h"
#include "core/rounds/bucket.h"
#include "core/rounds/coordinator.h"
#include "core/rounds/statistics.h"
#include "core/values/types.h"

namespace horovod_partial {

// What each rank does in each step, and how long that takes. Times are in seconds.
struct JobConfig {
  int ranks = 1;
  int iterations = 1;
  Policy policy;
  // The messages of a step: each has gradients that travel together, or one message has the model. `ready` counts from
  // the start of the step. Messages are sorted by `ready`, and none is ready after the compute.
  std::vector<Gradient> messages;
  Late late = Late::kAccumulate;  // `kAccumulate` if messages are gradients; other values mean a model
  double compute = 0;             // the time of a step without its delay; above 0
  std::vector<double> delays;     // [iteration * ranks + rank]: a delay before the compute of the step
  std::vector<LinearCost> costs;  // [n - 1]: the cost of a reduction among n ranks
  double cycle = 0;               // the least time from one negotiation to the next
  int period = 0;                 // WP-SGD: steps of the fastest rank between two averages; if 0, each step averages
  bool overlap = false;           // models: an average runs beside the next step, which ends after the average
};

struct JobResult {
  std::vector<double> ends;                // [iteration * ranks + rank]: when the step ended
  std::int64_t arrivals = 0;               // the number of arrivals with gradients or a model
  std::int64_t late = 0;                   // the number of arrivals that were too late for their round
  std::vector<BucketStatistics> messages;  // the statistics of each message's rounds
  std::vector<double> received;            // for each rank: the sum of all results, where each gradient is 1
};

// Simulates one job in one thread. The classes that decide in a real job (Coordinator, Bucket) run here too, driven by
// events. Ranks compute, and arrive at the rounds of their messages. The background threads of all ranks run in
// lockstep, as in Horovod: they negotiate, reduce the closed rounds one after the other, and negotiate again. The
// groups of a round reduce at the same time.
//
// Reports and Closing messages take no time: a negotiation knows all earlier arrivals. If negotiations take time in
// reality, the costs of reductions must include that. Ranks report that they wait (docs/protocol.md, rule 7) only when
// nothing else can happen. Before the end of a job something always can, because all ranks arrive at the messages of a
// step in the same order. At the end fewer ranks than a quorum may have steps left, and each may wait for another
// message.
class Job {
 public:
  explicit Job(JobConfig config);

  // Runs the job to its end: all ranks have taken all steps, and nothing is pending. To be called once.
  JobResult Run();

 private:
  // One rank's part of a message.
  struct Local {
    Bucket bucket;
    double value = 0;  // the application's tensor, which is input and output of an arrival
    Time arrived{0};
    bool outstanding = false;  // true if the application waits for the result of the arrival
    bool reportable = false;   // true if the rank's next report may have an item for this message
  };
  struct RankState {
    std::vector<Local> locals;            // the rank's part of each message; the bucket that ends periods comes last
    std::vector<std::size_t> reportable;  // the messages with `reportable` set
    int iteration = 0;
    Time start{0};         // when the compute of the step began
    std::size_t next = 0;  // the next message of this step at which the rank arrives
    bool computing = false;
    bool averaged = false;  // true once the average of this step has begun, or is known not to be due
    int outstanding = 0;    // the number of arrivals that wait for their results
    Periods periods{0};
    bool ended = false;
    bool waits = false;     // true if this rank reports to the coordinator that it waits
    bool has_news = false;  // true if the next negotiation must read a report of this rank
  };
  using Event = std::pair<Time, Rank>;  // when a message is ready or the compute ends, and on which rank
  struct Reduction {
    Time end;
    std::size_t message;
    Members members;
  };

  RankState& At(Rank rank) { return ranks_[Index(rank)]; }
  bool HasPeriods() const { return config_.period > 0; }
  bool AveragesAfterCompute() const { return HasPeriods() || config_.overlap; }
  std::size_t Signal() const { return config_.messages.size(); }  // the index of the bucket that ends periods
  const Policy& PolicyOf(std::size_t message) const { return message == Signal() ? signal_policy_ : config_.policy; }

  // What the application of a rank does.
  void StartStep(Rank rank);
  void Compute(Rank rank);
  void Proceed(Rank rank);
  void Arrive(Rank rank, std::size_t message);
  void Receive(Rank rank, Local& local, bool on_time);
  static void MakeReportable(RankState& state, std::size_t message);
  void HaveNews(Rank rank);

  // What the background threads do.
  Time NextNegotiation() const;
  void Negotiate();
  bool CloseByLiveness();
  void Observe(Rank rank);
  void Begin(const Closing& closing);
  void Reduce(const Closing& closing, std::size_t message, const Members& members);
  void Finish();

  const JobConfig config_;
  Policy signal_policy_;  // of the bucket that ends periods: its round closes when a rank has taken the steps of one
  Coordinator coordinator_;
  std::vector<RankState> ranks_;
  JobResult result_;

  Time now_{0};
  // The next event of each rank that computes; the earliest one is on top.
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::deque<Reduction> running_;  // the reductions that run, sorted by their ends
  Time free_{0};                   // when the last reduction ends
  Time negotiated_;                // when the last cycle began
  Time wanted_ = kNever;           // since when a rank has something to report, or kNever
  Time deadline_ = kNever;         // when the coordinator wants the next cycle, or kNever
  std::vector<Rank> news_;
  int open_ = 0;       // the number of arrivals whose round has not closed
  int ended_ = 0;      // the number of ranks that have ended
  bool over_ = false;  // true if the last rounds of the job have closed
};

}  // namespace horovod_partial
