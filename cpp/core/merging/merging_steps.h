// Tells in which message each gradient of a step travels, and when to plan again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace horovod_partial {

// Follows a training whose gradients travel by a plan, which may change between two steps (MG-WFBP, docs/tuning.md).
// Gradients are known by their number. Times are seconds of one clock.
class MergingSteps {
 public:
  // the gradients of each message, in the order in which they lie in it
  using Messages = std::vector<std::vector<int>>;

  struct Declaration {
    std::string name;                    // the prefix of the names of the messages' buckets
    std::vector<std::int64_t> elements;  // of each gradient
    Messages messages;                   // used before the first plan
    std::int64_t due = 0;                // number of steps before the first plan
    std::size_t window = 0;              // number of steps to measure

    bool operator==(const Declaration& other) const;
  };

  // Throws std::invalid_argument unless each gradient is in one message.
  explicit MergingSteps(Declaration declaration);

  // Goes back to the state after construction.
  void Restart();

  struct Place {
    std::string bucket;
    std::vector<std::int64_t> elements;  // of each gradient in the message
    std::size_t position;                // this gradient's place among them
  };
  // Call it when a gradient of the step is ready. Throws std::invalid_argument if there is no gradient of this number,
  // or it has another size.
  Place RecordGradient(int gradient, std::int64_t elements, double now);
  // Call it when all gradients of the step are ready, if they come at the same moment.
  void RecordAllGradients(double now);
  // Call it when all results of the step are there. Returns true if it is time to plan.
  bool StepEnded(double now);
  // True if a plan may need the times of the present step: the first and the last steps under each plan are kept.
  bool Measures() const;

  // Call it between two steps. `messages`: the messages from now on, if they change. `due`: how many steps until the
  // next plan, if there is one. Throws like the constructor.
  void Plan(std::optional<Messages> messages, std::optional<std::int64_t> due);
  // How many plans were made since the last restart.
  std::int64_t plans() const { return plans_; }

  // A step: the time of each gradient (not a number if it did not come), then the time of the step's end.
  using Row = std::vector<double>;
  // The first steps under the present plan, and the last ones. There is one row more than steps to measure, because a
  // step begins at the end of the one before.
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
  std::vector<Where> places_;  // by gradient
  std::string prefix_;         // of the buckets' names; it differs for each plan
  std::int64_t plans_ = 0;
  std::int64_t steps_ = 0;
  std::optional<std::int64_t> due_;
  Row current_;
  std::deque<Row> first_;
  std::deque<Row> last_;
};

}  // namespace horovod_partial
