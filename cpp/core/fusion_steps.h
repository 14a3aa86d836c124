// Which message does each gradient of a step travel in, and when is it time to plan anew?
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace horovod_partial {

// The steps of a training whose gradients travel by a plan, which may be replaced between two of them (MG-WFBP,
// docs/tuning.md). Gradients are known by their number. Moments are seconds of one clock.
class FusionSteps {
 public:
  using Messages = std::vector<std::vector<int>>;  // the gradients of each, in the order in which they lie in it

  struct Declaration {
    std::string name;                    // of the messages' buckets
    std::vector<std::int64_t> elements;  // of each gradient
    Messages messages;                   // before there is a plan
    std::int64_t due = 0;                // steps before the first plan
    std::size_t window = 0;              // steps to measure

    bool operator==(const Declaration& other) const;
  };

  // Throws std::invalid_argument unless each gradient is in one message.
  explicit FusionSteps(Declaration declaration);

  // As after the declaration.
  void Restart();

  struct Place {
    std::string bucket;
    std::vector<std::int64_t> elements;  // of each gradient in the message
    std::size_t position;                // of this one among them
  };
  // A gradient of the step is there. Throws std::invalid_argument if there is no such gradient, or it has another size.
  Place RecordGradient(int gradient, std::int64_t elements, double now);
  // All gradients of the step are there, where they come at the same moment.
  void RecordAllGradients(double now);
  // All results are there. True if it is time to plan.
  bool StepEnded(double now);
  // Whether the times of the present step can matter to a plan: the first and the last steps under each are kept.
  bool Measures() const;

  // Between two steps: the messages from now on, if they change, and after how many steps to plan anew, if ever.
  // Throws as the constructor.
  void Plan(std::optional<Messages> messages, std::optional<std::int64_t> due);
  // Since the last restart.
  std::int64_t plans() const { return plans_; }

  // Of a step: the moment of each gradient, not a number if it did not come, and that of the step's end behind them.
  using Row = std::vector<double>;
  // The first steps under the plan in use, and the last ones: one more than were to be measured, since a step begins
  // where the one before has ended.
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
  std::string prefix_;         // of the buckets' names: another one for each plan
  std::int64_t plans_ = 0;
  std::int64_t steps_ = 0;
  std::optional<std::int64_t> due_;
  Row current_;
  std::deque<Row> first_;
  std::deque<Row> last_;
};

}  // namespace horovod_partial
