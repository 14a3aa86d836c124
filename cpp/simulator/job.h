// A whole job in simulated time: how long do its iterations take?
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <queue>
#include <string>
#include <utility>
#include <vector>

#include "core/bucket.h"
#include "core/coordinator.h"
#include "core/fusion_plan.h"
#include "core/periods.h"
#include "core/policy.h"
#include "core/statistics.h"
#include "core/types.h"

namespace horovod_partial {

// What each rank does in each step, and what that takes. Times are in seconds.
struct JobConfig {
  // What travels together.
  struct Message {
    double ready = 0;  // after the step's start; not less than that of the message before
    double bytes = 0;
  };

  int ranks = 1;
  int iterations = 1;
  Policy policy;
  std::vector<Message> messages;  // gradients; or one, the model, that is ready when the step has been computed
  Late late = Late::kAccumulate;  // gradients; else models
  double compute = 0;             // of a step, without delay; above 0
  std::vector<double> delays;     // [iteration * ranks + rank], before the step's compute
  std::vector<LinearCost> costs;  // of a reduction among n ranks: [n - 1]
  double cycle = 0;               // at least so long from one negotiation to the next
  int period = 0;  // ranks average only when the fastest has taken so many steps (WP-SGD); 0: in each step
};

struct JobResult {
  std::vector<double> ends;                // [iteration * ranks + rank]: when the step ended
  std::int64_t arrivals = 0;               // with gradients or a model
  std::int64_t late = 0;                   // so many of them were too late for their round
  std::vector<BucketStatistics> messages;  // rounds, by message
  std::vector<double> closed;              // when each round of the last message was
  std::vector<double> received;            // by rank: the sum of all results, where each gradient is a one
};

// One job in one thread: the code that decides in a real job (Coordinator, Bucket), driven by events. Ranks compute,
// and arrive at the rounds of their messages. The background threads of all ranks go in lock step, as Horovod's do:
// they negotiate, reduce what the coordinator has closed, one round after the other, and negotiate again. The groups of
// a round reduce at the same time.
//
// There is no message on its way: a negotiation knows of every arrival before it, and takes no time. Where it does,
// that is part of what a reduction costs. Ranks report that they wait (rule 7) only when nothing else can happen any
// more: all arrive at the messages of a step in the same order, so it takes an end, where the ranks that are left are
// fewer than a quorum, and some were too late for one message and others for another.
class Job {
 public:
  // Throws std::invalid_argument if the lengths in `config` do not fit together.
  explicit Job(JobConfig config);

  // To the end: all ranks have taken all steps, and what was pending has been delivered. Call it once.
  JobResult Run();

 private:
  // A rank's share of a message.
  struct Local {
    explicit Local(std::string name, const BucketOptions& options) : bucket(std::move(name), options) {}

    Bucket bucket;
    double value = 0;  // the application's memory, input and output of an arrival
    Time arrived{0};
    bool outstanding = false;  // the application waits for the arrival's result
    bool reportable = false;   // the rank's next report may have something to say of it
  };
  struct RankState {
    std::vector<Local> locals;  // by message; behind them the signal that a period is over, if there are periods
    std::vector<std::size_t> reportable;  // messages
    int iteration = 0;
    Time start{0};         // of the step's compute
    std::size_t next = 0;  // message of this step to arrive at
    bool computing = false;
    bool averaged = false;  // with periods: this step has asked for its average
    int outstanding = 0;    // arrivals
    Periods periods{0};
    bool ended = false;
    bool waits = false;     // as the coordinator has been told
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
  std::size_t Signal() const { return config_.messages.size(); }  // behind the messages
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
  std::priority_queue<Event> events_;  // of ranks that compute, one for each
  std::deque<Reduction> running_;      // in the order of their ends
  Time free_{0};                       // when the last of them ends
  Time negotiated_;                    // when the last cycle began
  Time wanted_ = kNever;               // since when a rank has news
  Time deadline_ = kNever;             // the coordinator's
  std::vector<Rank> news_;
  int open_ = 0;       // arrivals whose round has not closed
  int ended_ = 0;      // ranks
  bool over_ = false;  // the rounds of the end have closed
};

}  // namespace horovod_partial
