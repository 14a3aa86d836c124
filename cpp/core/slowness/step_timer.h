// Finds the steps of one rank while the job runs, and lines up the steps of the ranks.
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

#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

struct TimedStep {
  std::int64_t number = 0;
  double seconds = 0;  // how long the rank computed

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("number", self.number), Named("seconds", self.seconds));
  }
};

// What a rank tells of its steps.
struct StepReport {
  std::vector<TimedStep> ended;  // since the last report
  std::int64_t bytes = 0;        // handed over for reduction since the last report

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("ended", self.ended), Named("bytes", self.bytes));
  }
};

// One step of a rank.
struct Step {
  std::int64_t bucket = -1;  // the one with the most bytes; -1 for a step of Horovod's own reductions
  std::int64_t number = 0;
  std::optional<Time> begin;  // unknown if the step before is
  Time handed{0};             // the last arrival
  Time result{0};             // the last result
  Time blocked{0};            // how long the application was blocked, from begin to handed
  Time reduced{0};            // how long reductions ran while the application was blocked, or after handed
  Round round = -1;           // the newest one with a result in the step
  bool late = false;
  int staleness = 0;
  std::size_t bytes = 0;
};

// Counts steps: a name that comes again begins the next one.
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

// Spans of time that do not overlap. They must be added in the order of their ends.
class Spans {
 public:
  void Add(Time begin, Time end);
  // Forgets what ended before `time`.
  void ForgetBefore(Time time);
  // Returns how much of the time from `begin` to `end` lies in the spans.
  Time Within(Time begin, Time end) const;
  // Returns how much of it lies both in these spans and in others.
  Time WithinBoth(Time begin, Time end, const Spans& others) const;

 private:
  static constexpr std::size_t kMost = 4096;  // spans of one step; older ones are forgotten
  std::deque<std::pair<Time, Time>> spans_;
};

// Finds the steps of a rank. A step begins with the last arrival, result or end of a wait for a round of the step
// before, and its compute ends with its own last arrival. Under work sharing a micro-batch counts as a step. A step is
// passed on when the next one has closed, because until then a wait that was open in the step may end.
class StepTimer {
 public:
  explicit StepTimer(std::function<void(const Step&)> pass_on) : pass_on_(std::move(pass_on)) {}

  // What has these names was handed over: to a bucket, or (-1) to Horovod. A name that comes again begins a step.
  void Arrived(const std::vector<std::string>& names, std::int64_t bucket, Time time, std::size_t bytes);
  void Got(std::int64_t bucket, Time time, Round round, bool late, int staleness);
  // The application was blocked, for a round or for something else.
  void Waited(Time begin, Time end, bool for_round);
  // A reduction of any kind ran.
  void Reduced(Time begin, Time end) { reductions_.Add(begin, end); }
  // Passes on the last steps. The next one will have no begin.
  void Flush();
  // Returns the compute times of the steps since the last call. If nobody takes them, the newest ones are dropped.
  std::vector<TimedStep> Take() { return std::exchange(computed_, {}); }
  // Returns how many bytes have arrived.
  std::size_t bytes() const { return bytes_; }

 private:
  struct Row : Step {
    std::size_t most = 0;                // the bytes of `bucket`
    std::set<std::int64_t> outstanding;  // buckets without a result
  };
  // Passes on steps up to the first one without all results, but for the last `kept` ones.
  void PassOnBut(std::size_t kept);

  static constexpr std::size_t kMost = 2048;  // older rows and newer compute times are forgotten
  std::function<void(const Step&)> pass_on_;
  StepCounter counter_;
  std::deque<Row> rows_;  // that have not been passed on; the last one is open
  bool follows_ = false;  // whether the step before the first row was passed on
  Time resumed_{0};       // when the last result came, or the last wait for a round ended
  Spans blocked_, reductions_;
  std::vector<TimedStep> computed_;
  std::size_t bytes_ = 0;
};

// Steps are lined up by their numbers. Under a policy that does not wait for slow ranks, a fast rank may be far ahead.
// When it is kMostAhead steps ahead, its oldest step is left out, and its later steps count as one step earlier.
class StepRows {
 public:
  static constexpr std::size_t kMostAhead = 4096;
  static constexpr int kPatience = 10;

  explicit StepRows(int size) : ranks_(static_cast<std::size_t>(size)) {}

  // A rank is waited for from its first step on. For the first step, kPatience calls of Take wait: the rank may not
  // watch its steps.
  void Add(Rank rank, const std::vector<TimedStep>& steps);
  // Says whether a rank takes no steps, because it is gone, has joined or has ended. Then nobody waits for its steps.
  // If it comes back and has missed steps meanwhile, its next step counts as one of the next row.
  void SetOut(Rank rank, bool out);
  // Returns steps for which nobody must be waited for, at most so many: the seconds of each rank, NaN for a rank
  // without the step.
  std::vector<std::vector<double>> Take(std::size_t most);

 private:
  struct RankSteps {
    std::deque<TimedStep> steps;
    std::int64_t left_out = 0;
    bool out = false;
    bool was_out = false;  // since its last step
    bool has_begun = false;

    std::int64_t next() const { return steps.front().number - left_out; }
  };
  std::vector<RankSteps> ranks_;
  std::int64_t row_ = 0;  // the number of the next row, at least
  int takes_ = 0;         // the number of calls of Take since the first step of any rank
};

}  // namespace horovod_partial
