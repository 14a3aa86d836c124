// Finds the steps of one rank while the job runs, and lines up the steps of all ranks by their numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/slowness/slow_parts.h"
#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

struct TimedStep {
  std::int64_t number = 0;
  double seconds = 0;  // how long the rank computed in the step
  Parts parts = {};

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("number", self.number), Named("seconds", self.seconds), Named("parts", self.parts));
  }
};

// What a rank reports of its steps.
struct StepReport {
  std::vector<TimedStep> ended;  // the steps that have ended since the last report
  std::int64_t bytes = 0;        // the bytes that the rank has handed over for reduction since the last report
  double seconds = 0;            // how long the steps in `ended` took, from the begin of each to the begin of the next

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("ended", self.ended), Named("bytes", self.bytes), Named("seconds", self.seconds));
  }
};

// One step of a rank.
struct Step {
  std::int64_t bucket = -1;  // the number of the bucket with the most bytes; -1 for a step of Horovod's own reductions
  std::int64_t number = 0;
  std::optional<Time> begin;  // when the step began; empty if the step before was not recorded
  Time handed{0};             // when the last contribution was handed over
  Time result{0};             // when the last result came
  Time blocked{0};            // how long the application was blocked between `begin` and `handed`
  Time reduced{0};            // how long reductions ran while the application was blocked, and after `handed`
  Parts parts;                // what the rank did while it computed
  Round round = -1;           // the newest round that had a result in the step
  bool late = false;
  int staleness = 0;
  std::size_t bytes = 0;
};

// Counts the steps of a rank by the names of the tensors in them: a name that comes again begins the next step.
class StepCounter {
 public:
  // Returns the number of the step, from 0, to which all of these names belong.
  std::int64_t Count(const std::vector<std::string>& names) {
    std::vector<std::size_t> hashes;  // if two names have one hash, a step begins too early, but nothing worse happens
    for (const std::string& name : names) hashes.push_back(std::hash<std::string>{}(name));
    const bool is_full = seen_.size() >= kMostNames;
    if (is_full ||
        std::any_of(hashes.begin(), hashes.end(), [this](std::size_t hash) { return seen_.count(hash) > 0; })) {
      seen_.clear();
      ++step_;
    }
    seen_.insert(hashes.begin(), hashes.end());
    return step_;
  }

 private:
  // The largest number of names in a step. It bounds the memory if a program gives each operation a new name.
  static constexpr std::size_t kMostNames = 1 << 20;
  std::unordered_set<std::size_t> seen_;
  std::int64_t step_ = 0;
};

// A list of spans of time. They must be added in the order of their ends. Spans that overlap become one span.
class Spans {
 public:
  void Add(Time begin, Time end);
  // Forgets the spans that ended at or before `time`.
  void ForgetBefore(Time time);
  // Returns how much of the time from `begin` to `end` lies in the spans.
  Time Within(Time begin, Time end) const;
  // Returns how much of the time from `begin` to `end` lies both in these spans and in `others`.
  Time WithinBoth(Time begin, Time end, const Spans& others) const;
  // Returns the first begin of a span at or after `time`, but no later than `end`.
  Time FirstBegin(Time time, Time end) const;

 private:
  static constexpr std::size_t kMost = 4096;  // the number of spans that are kept; older spans are forgotten
  std::deque<std::pair<Time, Time>> spans_;
};

// What a program does that tells the parts of a step: it asks an iterator for a batch, or its optimizer ends a step.
struct Mark {
  static constexpr std::int64_t kOptimizer = -1;  // in place of an iterator: the optimizer's step ended at `end`

  std::int64_t iterator = kOptimizer;  // which iterator; each has a number of its own
  Time begin{0}, end{0};
  bool gives = false;  // true if a batch came; false if the iterator was made
};

// Finds the steps of a rank. A step begins after the last arrival, the last result and the last wait for a round of the
// step before. Its compute ends with its own last arrival. Under work sharing a micro-batch counts as a step. A step is
// passed on when the next step has ended, because a wait that began in the step may last until then.
class StepTimer {
 public:
  explicit StepTimer(std::function<void(const Step&)> pass_on) : pass_on_(std::move(pass_on)) {}

  // Records that tensors with these names were handed over to a bucket, or to Horovod itself if `bucket` is -1. A name
  // that the present step has already begins the next step.
  void Arrived(const std::vector<std::string>& names, std::int64_t bucket, Time time, std::size_t bytes);
  void Got(std::int64_t bucket, Time time, Round round, bool late, int staleness);
  // Records that the application was blocked. `for_round`: true if it waited for a round.
  void Waited(Time begin, Time end, bool for_round);
  // Records that tensors are on their way to Arrived, which is told of them only when they have been reduced.
  void Handed(Time time) { handed_.Add(time, time); }
  void Marked(const Mark& mark);
  // Records that a reduction ran, be it of a bucket or of Horovod's own.
  void Reduced(Time begin, Time end) { reductions_.Add(begin, end); }
  // Passes on the last steps. The first step after them will have no `begin`.
  void Flush();
  // Returns what has happened since the last call. While kMost steps are untaken, new ones are dropped.
  StepReport Take() { return std::exchange(report_, {}); }
  // Returns how many bytes have been handed over so far.
  std::size_t bytes() const { return bytes_; }

 private:
  struct Row : Step {
    std::size_t most = 0;                // the bytes of the contribution to `bucket`
    std::set<std::int64_t> outstanding;  // the buckets whose results have not come yet
  };
  // Passes on the oldest steps, up to the first step that lacks a result. Always keeps the last `kept` steps.
  void PassOnBut(std::size_t kept);
  // Returns what the rank did in a step, from its begin to its last arrival.
  Parts PartsOf(Time begin, Time handed) const;

  static constexpr std::size_t kMost = 2048;  // the most rows, and the most untaken steps, that are kept
  static constexpr std::size_t kMostMarks = 4096;
  std::function<void(const Step&)> pass_on_;
  StepCounter counter_;
  std::deque<Row> rows_;  // the steps that have not been passed on; the last step is open
  bool follows_ = false;  // whether the step before the first row was passed on
  Time resumed_{0};       // when the last result came, or the last wait for a round ended
  Spans blocked_, reductions_;
  Spans handed_;            // the times at which tensors were handed over
  std::deque<Mark> marks_;  // since the last arrival of the step before the one that was passed on last
  Time last_handed_{0};     // the last arrival of the step that was passed on last
  bool optimizes_ = false;  // whether the end of an optimizer's step was ever told
  StepReport report_;       // what Take returns next
  std::size_t bytes_ = 0;
};

// Lines up the steps of all ranks by their numbers. Under a policy that does not wait for slow ranks, a fast rank may
// be far ahead. When it is kMostAhead steps ahead, its oldest step is left out, and its later steps count as one step
// earlier.
class StepRows {
 public:
  static constexpr std::size_t kMostAhead = 4096;
  static constexpr int kPatience = 10;

  explicit StepRows(int size) : ranks_(static_cast<std::size_t>(size)) {}

  // Adds steps of a rank. Take waits for each rank that has added a step. For a rank without any step only the first
  // kPatience calls of Take wait, because that rank may not watch its steps.
  void Add(Rank rank, const std::vector<TimedStep>& steps);
  // Says whether a rank takes no steps, because it is gone, has joined or has ended. Then Take does not wait for its
  // steps. If the rank comes back, and the others have taken steps meanwhile, its next step belongs to the next row.
  void SetOut(Rank rank, bool out);
  // One step of all ranks: how many seconds each computed, NaN for a rank without the step, and the parts of that time.
  struct Row {
    std::vector<double> seconds;
    std::vector<Parts> parts;
  };
  // Returns the rows that need no more waiting, but at most `most` of them.
  std::vector<Row> Take(std::size_t most);

 private:
  struct RankSteps {
    std::deque<TimedStep> steps;
    std::int64_t left_out = 0;
    bool out = false;
    bool was_out = false;  // true if the rank was out at some time since its last step
    bool has_begun = false;

    std::int64_t next() const { return steps.front().number - left_out; }
  };
  std::vector<RankSteps> ranks_;
  std::int64_t row_ = 0;  // the next row has this number or a higher one
  int takes_ = 0;         // the number of calls of Take since the first step of any rank
};

}  // namespace horovod_partial
