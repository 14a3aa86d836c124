#include "core/merging/merging_steps.h"

#include <limits>
#include <stdexcept>
#include <utility>

namespace horovod_partial {

bool MergingSteps::Declaration::operator==(const Declaration& other) const {
  return name == other.name && elements == other.elements && messages == other.messages && due == other.due &&
         window == other.window;
}

MergingSteps::MergingSteps(Declaration declaration) : declaration_(std::move(declaration)) { Restart(); }

void MergingSteps::Restart() {
  Use(declaration_.messages, declaration_.name);
  plans_ = steps_ = 0;
  due_ = declaration_.due;
  ForgetTimes();
}

void MergingSteps::Use(Messages messages, std::string prefix) {
  std::vector<Where> places(declaration_.elements.size());
  std::vector<bool> found(places.size());
  std::size_t count = 0;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    for (std::size_t j = 0; j < messages[i].size(); ++j) {
      const auto gradient = static_cast<std::size_t>(messages[i][j]);
      if (gradient >= places.size() || found[gradient])
        throw std::invalid_argument("a plan of " + declaration_.name + " has gradient " +
                                    std::to_string(messages[i][j]) + " twice, or no gradient has this number");
      found[gradient] = true;
      places[gradient] = {i, j};
      ++count;
    }
  }
  if (count != places.size()) throw std::invalid_argument("a plan of " + declaration_.name + " lacks gradients");
  messages_ = std::move(messages);
  places_ = std::move(places);
  prefix_ = std::move(prefix);
}

void MergingSteps::ForgetTimes() {
  current_.assign(declaration_.elements.size(), std::numeric_limits<double>::quiet_NaN());
  first_.clear();
  last_.clear();
}

MergingSteps::Place MergingSteps::RecordGradient(int gradient, std::int64_t elements, double now) {
  const auto index = static_cast<std::size_t>(gradient);
  if (index >= places_.size())
    throw std::invalid_argument(declaration_.name + " has no gradient " + std::to_string(gradient));
  if (elements != declaration_.elements[index])
    throw std::invalid_argument("gradient " + std::to_string(gradient) + " of " + declaration_.name + " has " +
                                std::to_string(elements) + " elements, and was declared with " +
                                std::to_string(declaration_.elements[index]));
  current_[index] = now;
  const auto [message, position] = places_[index];
  Place place{prefix_ + "." + std::to_string(message), {}, position};
  for (const int member : messages_[message])
    place.elements.push_back(declaration_.elements[static_cast<std::size_t>(member)]);
  return place;
}

void MergingSteps::RecordAllGradients(double now) { current_.assign(current_.size(), now); }

bool MergingSteps::StepEnded(double now) {
  const std::size_t most = declaration_.window + 1;
  Row row = current_;
  row.push_back(now);
  current_.assign(current_.size(), std::numeric_limits<double>::quiet_NaN());
  if (first_.size() < most) first_.push_back(row);
  last_.push_back(std::move(row));
  if (last_.size() > most) last_.pop_front();
  ++steps_;
  return steps_ == due_;
}

bool MergingSteps::Measures() const {
  const std::size_t most = declaration_.window + 1;
  return first_.size() < most || (due_ && steps_ < *due_ && *due_ - steps_ <= static_cast<std::int64_t>(most));
}

void MergingSteps::Plan(std::optional<Messages> messages, std::optional<std::int64_t> due) {
  if (messages) Use(*std::move(messages), declaration_.name + ".plan" + std::to_string(plans_ + 1));
  ++plans_;
  due_.reset();
  if (due) due_ = steps_ + *due;
  ForgetTimes();
}

}  // namespace horovod_partial
