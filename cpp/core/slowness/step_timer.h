// Measures how long one rank computes in each of its steps, while the job runs, and lines up the steps of the ranks.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <tuple>
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
  bool operator==(const TimedStep& other) const { return Fields(*this) == Fields(other); }
};

// What a rank tells of its steps.
struct StepReport {
  std::vector<TimedStep> ended;  // since the last report
  std::int64_t bytes = 0;        // handed over for reduction since the last report

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("ended", self.ended), Named("bytes", self.bytes));
  }
  bool operator==(const StepReport& other) const { return Fields(*this) == Fields(other); }
};

// When the application was blocked. Spans must be added in the order of their ends.
class Blocked {
 public:
  void Add(Time begin, Time end);
  // Forgets what ended before `time`.
  void ForgetBefore(Time time);
  // Returns for how long the application was blocked from `begin` to `end`.
  Time Within(Time begin, Time end) const;

 private:
  static constexpr std::size_t kMost = 4096;  // spans of one step; older ones are forgotten
  std::deque<std::pair<Time, Time>> spans_;   // they do not overlap
};

// Steps that have ended and were not taken yet. If nobody takes them, the newest ones are dropped.
class EndedSteps {
 public:
  void Add(std::int64_t number, Time compute) {
    if (steps_.size() < kMost) steps_.push_back({number, std::chrono::duration<double>(compute).count()});
  }
  std::vector<TimedStep> Take() { return std::exchange(steps_, {}); }

 private:
  static constexpr std::size_t kMost = 2048;
  std::vector<TimedStep> steps_;
};

// Steps of a policy with rounds. A step begins with the last arrival, result or end of a wait of the step before, and
// its compute ends with its own last arrival. Under work sharing a micro-batch counts as a step.
class ArrivalSteps {
 public:
  void Arrived(std::int64_t step, Time time);
  void Got(Time time) { resumed_ = std::max(resumed_, time); }
  // The application was blocked: in a wait for a round, or for an operation of Horovod's own.
  void Waited(Time begin, Time end, bool for_round);
  // Returns the steps that have ended since the last call.
  std::vector<TimedStep> Take() { return ended_.Take(); }

 private:
  std::optional<std::int64_t> step_;
  std::optional<Time> begin_;  // of the present step; unknown for the first one
  Time handed_{0};             // the last arrival
  Time resumed_{0};            // when the last result or wait for a round ended
  Blocked blocked_;
  EndedSteps ended_;
};

// Steps without rounds, from the reductions of Horovod's own. A step begins when the last reduction of the step before
// has ended. Its compute ends when Horovod's cycle last saw new tensors before the last reduction of the step.
class ReductionSteps {
 public:
  void Handed(Time time);
  void Reduced(std::int64_t step, Time begin, Time end);
  void Waited(Time begin, Time end) { blocked_.Add(begin, end); }
  std::vector<TimedStep> Take() { return ended_.Take(); }

 private:
  static constexpr std::size_t kMostHanded = 4096;  // of one step; older ones are forgotten
  std::optional<std::int64_t> step_;
  std::optional<Time> begin_;
  Time last_begin_{0}, last_end_{0};  // of the last reduction of the present step
  std::deque<Time> handed_;
  Blocked blocked_;
  EndedSteps ended_;
};

// The steps of the training: those of whichever way more bytes have gone.
class StepTimer {
 public:
  void Arrived(std::int64_t step, Time time, std::size_t bytes);
  void Got(Time time) { arrivals_.Got(time); }
  void Waited(Time begin, Time end, bool for_round);
  void Handed(Time time) { reductions_.Handed(time); }
  void Reduced(std::int64_t step, Time begin, Time end, std::size_t bytes);
  StepReport Take();

 private:
  ArrivalSteps arrivals_;
  ReductionSteps reductions_;
  std::size_t arrived_ = 0, reduced_ = 0;  // bytes
  std::size_t reported_ = 0;               // the bytes in all reports so far
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
  struct Member {
    std::deque<TimedStep> steps;
    std::int64_t left_out = 0;
    bool out = false;
    bool was_out = false;  // since its last step
    bool has_begun = false;

    std::int64_t next() const { return steps.front().number - left_out; }
  };
  std::vector<Member> ranks_;
  std::int64_t row_ = 0;  // the number of the next row, at least
  int takes_ = 0;         // the number of calls of Take since the first step of any rank
};

}  // namespace horovod_partial
