#include "core/bucket.h"

#include <stdexcept>
#include <utility>

namespace horovod_partial {

Bucket::Bucket(std::string name, const BucketOptions& options)
    : name_(std::move(name)), options_(options), missed_(options.missed) {}

void Bucket::AddPending(const Arrival& arrival) {
  if (arrival.input == nullptr || options_.discard_late) return;
  if (options_.drop_nonfinite && !memory().AllFinite(options_.type, arrival.input, options_.elements)) {
    ++dropped_;
    return;
  }
  if (incoming_gradients_ == 0) {
    incoming_.Reserve(bytes(), memory());
    memory().Copy(incoming_.data(), arrival.input, bytes());
  } else {
    memory().Add(options_.type, incoming_.data(), arrival.input, options_.elements);
  }
  incoming_gradients_ += arrival.gradients;
}

void Bucket::MergePendingInto(Arrival& arrival) {
  if (!HasPending()) return;
  if (outgoing_gradients_ > 0) memory().Add(options_.type, arrival.output, outgoing_.data(), options_.elements);
  if (incoming_gradients_ > 0) memory().Add(options_.type, arrival.output, incoming_.data(), options_.elements);
  arrival.gradients += outgoing_gradients_ + incoming_gradients_;
  outgoing_gradients_ = incoming_gradients_ = 0;
}

Bucket::Arrived Bucket::Arrive(const Arrival& arrival) {
  if (state_ == State::kArrived || (state_ == State::kRunning && on_time_)) return Arrived::kBusy;
  if (state_ == State::kRunning) {
    AddPending(arrival);
    return Arrived::kWaiting;
  }
  only_delivers_ = arrival.input == nullptr;
  if (HasMissed() && !only_delivers_) {
    AddPending(arrival);
    return Arrived::kLate;
  }
  arrival_ = arrival;
  if (only_delivers_) {
    memory().Zero(arrival_.output, bytes());
    arrival_.input = arrival_.output;
  } else if (HasPending() && arrival_.input != arrival_.output) {
    // What is pending will be added where the contribution lies, and the application's input is not ours to change.
    memory().Copy(arrival_.output, arrival_.input, bytes());
    arrival_.input = arrival_.output;
  }
  reported_ = false;
  state_ = State::kArrived;
  return Arrived::kOnTime;
}

std::deque<Buffer> Bucket::TakeMissed(void* output) {
  std::deque<Buffer> results = missed_.Take();
  if (results.empty()) {  // only rounds without a gradient were missed
    memory().Zero(output, bytes());
    return results;
  }
  memory().Copy(output, results.back().data(), bytes());
  missed_.Recycle(std::move(results.back()));
  results.pop_back();
  return results;
}

int Bucket::ReportArrival() {
  if (!reported_) MergePendingInto(arrival_);
  reported_ = true;
  return arrival_.gradients;
}

int Bucket::ReportPending() {
  if (state_ == State::kRunning) return 0;  // outgoing_ is in use; what came since is announced afterwards
  if (reported()) return 0;
  if (incoming_gradients_ > 0) {
    if (outgoing_gradients_ == 0) {
      std::swap(outgoing_, incoming_);
    } else {
      memory().Add(options_.type, outgoing_.data(), incoming_.data(), options_.elements);
    }
    outgoing_gradients_ += std::exchange(incoming_gradients_, 0);
  }
  return outgoing_gradients_;
}

Bucket::Entry Bucket::Begin(const Closing& closing, Rank rank) {
  const auto& mine = closing.contributions.at(static_cast<std::size_t>(rank));
  const bool announced = reported();
  const int gradients = announced ? arrival_.gradients : outgoing_gradients_;
  if (state_ == State::kRunning || mine.fresh != announced || mine.gradients != gradients) {
    throw std::logic_error("round " + std::to_string(closing.round) + " of " + name_ + " on rank " +
                           std::to_string(rank) + " was closed with another contribution than the rank announced");
  }
  last_ = closing;
  declared_ = true;
  Entry entry;
  if (announced) {
    wants_full_round_ = false;
    on_time_ = true;
    entry.own = true;
    entry.input = arrival_.input;
    entry.output = arrival_.output;
  } else {
    on_time_ = false;
    if (state_ == State::kArrived) {
      entry.retract = true;
      if (!only_delivers_) AddPending(arrival_);
    }
    outgoing_.Reserve(bytes(), memory());
    if (outgoing_gradients_ == 0) outgoing_.Zero();
    entry.input = entry.output = outgoing_.data();
  }
  state_ = State::kRunning;
  return entry;
}

bool Bucket::Finish() {
  void* result = on_time_ ? arrival_.output : outgoing_.data();
  if (options_.divisor == Divisor::kContributors && last_.gradients() > 1)
    memory().Scale(options_.type, result, options_.elements, 1.0 / last_.gradients());
  completed_ = last_.round + 1;
  state_ = State::kIdle;
  if (on_time_ && !only_delivers_) return true;
  if (on_time_) {
    outgoing_.Reserve(bytes(), memory());
    memory().Copy(outgoing_.data(), arrival_.output, bytes());
  } else {
    outgoing_gradients_ = 0;
  }
  // A round that only delivered, and had nothing to deliver, is no update: a step with zeros would not be none.
  if (std::exchange(discard_result_, false) || last_.gradients() == 0) return false;
  if (options_.drop_nonfinite_results && !memory().AllFinite(options_.type, outgoing_.data(), options_.elements)) {
    ++dropped_;
    return false;
  }
  missed_.Push(outgoing_, options_.type, options_.elements);
  return false;
}

void Bucket::Clear() {
  incoming_gradients_ = 0;
  missed_.Clear();
  if (state_ == State::kRunning) {
    discard_result_ = !on_time_;
  } else if (outgoing_gradients_ > 0) {
    outgoing_.Zero();  // the coordinator may count on it already: it is delivered, as nothing
  }
  wants_full_round_ = declared_;
}

}  // namespace horovod_partial
