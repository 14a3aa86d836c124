// A whole job in simulated time: how long do its iterations take?
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "core/groups/periods.h"
#include "core/merging/merging_plan.h"
#include "core/quorum/policy.h"
#include "core/rounds/bucket.h"
#include "core/rounds/coordinator.h"
#include "core/rounds/statistics.h"
#include "core/values/types.h"

namespace horovod_partial {

// What each rank does in each step, and how long that takes. Times are in seconds.
struct JobConfig {
  // Gradients that travel together, or a model.
  struct Message {
    double ready = 0;  // after the step's start; not before the previous message
    double bytes = 0;
  };

  int ranks = 1;
  int iterations = 1;
  Policy policy;
  std::vector<Message> messages;  // gradients; or one, the model
  Late late = Late::kAccumulate;  // kAccumulate: messages are gradients; else a model
  double compute = 0;             // of a step, without its delay; above 0
  std::vector<double> delays;     // [iteration * ranks + rank], before the step's compute
  std::vector<LinearCost> costs;  // [n - 1]: of a reduction among n ranks
  double cycle = 0;               // the least time from one negotiation to the next
  int period = 0;                 // WP-SGD: ranks average when the fastest has taken so many steps; 0: in each step
};

struct JobResult {
  std::vector<double> ends;                // [iteration * ranks + rank]: when the step ended
  std::int64_t arrivals = 0;               // with gradients or a model; signals do not count
  std::int64_t late = 0;                   // how many of them were too late for their round
  std::vector<BucketStatistics> messages;  // rounds, by message
  std::vector<double> closed;              // when each round of the last message closed
  std::vector<double> received;            // by rank: the sum of all results, if each gradient is 1
};

// One job in one thread. The code that decides in a real job (Coordinator, Bucket) runs here too, driven by events.
// Ranks compute, and arrive at the rounds of their messages. The background threads of all ranks go in lock step, like
// Horovod's: they negotiate, reduce what the coordinator has closed, one round after the other, and negotiate again.
// The groups of a round reduce at the same time.
//
// Reports and closings take no time: a negotiation knows of every arrival before it. If negotiations take time in
// reality, the costs of reductions must include it. Ranks report that they wait (rule 7) only when nothing else can
// happen. That comes up only at the end of a job: fewer ranks than a quorum are left, and some of them were too late
// for one message, others for another. Before that all arrive at the messages of a step in the same order.
class Job {
 public:
  // Throws std::invalid_argument if the lengths in `config` do not fit together.
  explicit Job(JobConfig config);

  // Runs the job to its end: all ranks have taken all steps, and everything pending has been delivered. Call it once.
  JobResult Run();

 private:
  // One rank's side of a message.
  struct Local {
    explicit Local(std::string name, const BucketOptions& options) : bucket(std::move(name), options) {}

    Bucket bucket;
    double value = 0;  // the application's tensor: an arrival's input and output
    Time arrived{0};
    bool outstanding = false;  // the application waits for the arrival's result
    bool reportable = false;   // the rank's next report looks at it
  };
  struct RankState {
    std::vector<Local> locals;            // by message; with periods, the signal comes last
    std::vector<std::size_t> reportable;  // messages with `reportable`
    int iteration = 0;
    Time start{0};         // of the step's compute
    std::size_t next = 0;  // message of this step to arrive at
    bool computing = false;
    bool averaged = false;  // with periods: this step has asked for its average, if one is due
    int outstanding = 0;    // arrivals that wait for their results
    Periods periods{0};
    bool ended = false;
    bool waits = false;     // the coordinator has been told that this rank waits
    bool has_news = false;  // the coordinator must hear of it before it decides
  };
  struct Event {
    Time time;
    Rank rank;
    bool operator<(const Event& other) const {  // the earliest is on top
      return time != other.time ? time > other.time : rank > other.rank;
    }
  };
  struct Reduction {
    Time end;
    std::size_t message;
    Members members;
  };

  RankState& At(Rank rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  bool HasPeriods() const { return config_.period > 0; }
  std::size_t Signal() const { return config_.messages.size(); }  // it comes after the messages
  double BytesOf(std::size_t message) const;
  const Policy& PolicyOf(std::size_t message) const { return message == Signal() ? signal_policy_ : config_.policy; }

  // What a rank's application does.
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
  Policy signal_policy_;
  Coordinator coordinator_;
  std::vector<RankState> ranks_;
  JobResult result_;

  Time now_{0};
  std::priority_queue<Event> events_;  // one for each rank that computes
  std::deque<Reduction> running_;      // in the order of their ends
  Time free_{0};                       // when the last reduction ends
  Time negotiated_;                    // when the last cycle began
  Time wanted_ = kNever;               // since when a rank has news; kNever if none has
  Time deadline_ = kNever;             // the coordinator's next one
  std::vector<Rank> news_;
  int open_ = 0;       // arrivals whose round has not closed
  int ended_ = 0;      // ranks that have ended
  bool over_ = false;  // the rounds at the end of the job have closed
};

}  // namespace horovod_partial
