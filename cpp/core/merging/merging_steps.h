// Tells in which message each gradient of a step travels, and when to make a new plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace horovod_partial {

// Follows a training whose gradients travel by a plan, which may change between two steps (MG-WFBP, docs/tuning.md).
// Gradients are identified by numbers. Times are in seconds of one clock.
class MergingSteps {
 public:
  // For each message the numbers of its gradients, in the order in which they lie in the message.
  using Messages = std::vector<std::vector<int>>;

  struct Declaration {
    std::string name;                    // the prefix of the bucket names of all messages
    std::vector<std::int64_t> elements;  // the size of each gradient
    Messages messages;                   // the messages that are used before the first plan
    std::int64_t due = 0;                // the number of steps before the first plan
    std::size_t window = 0;              // the number of steps to measure

    bool operator==(const Declaration& other) const;
  };

  // Throws std::invalid_argument unless each gradient is in exactly one message.
  explicit MergingSteps(Declaration declaration);

  // Forgets all plans and times.
  void Restart();

  struct Place {
    std::string bucket;
    std::vector<std::int64_t> elements;  // the size of each gradient in the message
    std::size_t position;                // the index of this gradient in the message
  };
  // Records that a gradient of the step is ready, and returns where it travels. Throws std::invalid_argument if no
  // gradient has this number, or if it was declared with another size.
  Place RecordGradient(int gradient, std::int64_t elements, double now);
  // Records that all gradients of the step became ready at this moment.
  void RecordAllGradients(double now);
  // Records that all results of the step are there. Returns true if it is time to make a plan.
  bool StepEnded(double now);
  // Returns true if a plan may need the times of this step: they are kept for the first and last steps under each plan.
  bool Measures() const;

  // Must be called between two steps. Begins a new plan. `messages`, if given, replaces the present messages. `due` is
  // the number of steps until the next plan, if there is one. Throws std::invalid_argument like the constructor.
  void Plan(std::optional<Messages> messages, std::optional<std::int64_t> due);
  // Returns the number of plans since the last restart.
  std::int64_t plans() const { return plans_; }

  // The times of one step: when each gradient was ready (NaN if it did not come), then when the step ended.
  using Row = std::vector<double>;
  // The first and the last steps under the present plan. There is one row more than the steps to measure, because a
  // step begins when the step before it ends.
  const std::deque<Row>& first_rows() const { return first_; }
  const std::deque<Row>& last_rows() const { return last_; }

  const Declaration& declaration() const { return declaration_; }

 private:
  struct Where {
    std::size_t message = 0;
    std::size_t position = 0;
  };

  void Use(Messages messages, std::string prefix);
  void ForgetTimes();

  const Declaration declaration_;
  Messages messages_;
  std::vector<Where> places_;  // for each gradient: where it travels
  std::string prefix_;         // the prefix of the bucket names, which differs for each plan
  std::int64_t plans_ = 0;
  std::int64_t steps_ = 0;
  std::optional<std::int64_t> due_;
  Row current_;
  std::deque<Row> first_;
  std::deque<Row> last_;
};

}  // namespace horovod_partial
