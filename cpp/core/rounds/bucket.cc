#include "core/rounds/bucket.h"

#include <stdexcept>
#include <utility>

namespace horovod_partial {

Bucket::Bucket(std::string name, const BucketOptions& options)
    : name_(std::move(name)), options_(options), missed_(options.missed, options.replay_limit) {}

void Bucket::AddPending(const Arrival& arrival) {
  if (arrival.input == nullptr || options_.late != Late::kAccumulate) return;
  const bool first = incoming_gradients_ == 0;
  incoming_.Reserve(bytes(), memory());
  if (options_.drop_nonfinite) {
    if (!memory().AddIfFinite(options_.type, incoming_.data(), arrival.input, options_.elements, first)) {
      ++dropped_;
      return;
    }
  } else if (first) {
    memory().Copy(incoming_.data(), arrival.input, bytes());
  } else {
    memory().Add(options_.type, incoming_.data(), arrival.input, options_.elements);
  }
  incoming_gradients_ += arrival.gradients;
}

void Bucket::ForgetCleared() {
  if (std::exchange(cleared_, false)) outgoing_gradients_ = 0;
}

Bucket::Arrived Bucket::Arrive(const Arrival& arrival) {
  if (held_ || state_ == State::kArrived || (state_ == State::kRunning && on_time_)) return Arrived::kBusy;
  if (state_ == State::kRunning && last_.ends) return Arrived::kWaiting;
  only_delivers_ = arrival.input == nullptr;
  if (options_.late == Late::kKeep && !only_delivers_) {  // keeps the model
    incoming_.Reserve(bytes(), memory());
    memory().Copy(incoming_.data(), arrival.input, bytes());
    incoming_gradients_ = 1;
  }
  if (state_ == State::kRunning || (HasMissed() && !only_delivers_)) {
    AddPending(arrival);
    ++incoming_late_;
    return state_ == State::kRunning ? Arrived::kWaiting : Arrived::kLate;
  }
  arrival_ = arrival;
  if (options_.weights == Weights::kStaleness) arrival_.work = ++iteration_;
  if (only_delivers_) {
    memory().Zero(arrival_.output, bytes());
    arrival_.input = arrival_.output;
  } else if ((HasPending() || options_.weights != Weights::kUniform) && arrival_.input != arrival_.output) {
    // The pending sum will be added to the contribution, or the contribution will be multiplied by a weight. This is
    // done in the output tensor, because the application's input must not change.
    memory().Copy(arrival_.output, arrival_.input, bytes());
    arrival_.input = arrival_.output;
  }
  reported_ = false;
  state_ = State::kArrived;
  return Arrived::kOnTime;
}

bool Bucket::TakeMissed(void* output) {
  const bool kept = options_.late == Late::kKeep;
  const Buffer& own = incoming_gradients_ > 0 ? incoming_ : outgoing_;
  if (missed_.empty()) {  // the rank has missed only rounds without gradients
    if (kept && options_.divisor == Divisor::kContributors) {
      memory().Copy(output, own.data(), bytes());  // this rank's own model, as the average of a single model
    } else {
      memory().Zero(output, bytes());
    }
    return true;
  }
  MissedResults::Result result = missed_.Pop();
  const bool finite = options_.type != DataType::kFloat16 || result.rounds == 1 ||
                      memory().AddIfFinite(options_.type, output, result.sum.data(), options_.elements, true);
  memory().Copy(output, result.sum.data(), bytes());
  if (kept && options_.divisor == Divisor::kContributors) {
    // WAGMA-SGD, Algorithm 2: the missed sum of models contains an older model of this rank, or none. The newer model
    // is added as one more.
    memory().Add(options_.type, output, own.data(), options_.elements);
    memory().Scale(options_.type, output, options_.elements, 1.0 / (result.gradients + 1));
  }
  missed_.Recycle(std::move(result.sum));
  return finite;
}

int Bucket::TakeRounds(int rounds, void* output) {
  int gradients = 0;
  if (std::exchange(held_, false)) {
    if (arrival_.output != output) memory().Copy(output, arrival_.output, bytes());
    gradients = held_gradients_;
    --rounds;
  }
  while (rounds > 0 && !missed_.empty()) {  // a join on another thread may have dropped some of the missed results
    MissedResults::Result result = missed_.Pop();
    rounds -= result.rounds;
    if (result.gradients == 0) continue;
    if (gradients == 0) {
      memory().Copy(output, result.sum.data(), bytes());
    } else {
      memory().Add(options_.type, output, result.sum.data(), options_.elements);
    }
    gradients += result.gradients;
    missed_.Recycle(std::move(result.sum));
  }
  if (gradients == 0) memory().Zero(output, bytes());
  return gradients;
}

int Bucket::ReportArrival() {
  if (!reported_) ForgetCleared();
  if (!reported_ && HasPending()) {
    if (outgoing_gradients_ > 0) memory().Add(options_.type, arrival_.output, outgoing_.data(), options_.elements);
    if (incoming_gradients_ > 0) memory().Add(options_.type, arrival_.output, incoming_.data(), options_.elements);
    arrival_.gradients += outgoing_gradients_ + incoming_gradients_;
    outgoing_gradients_ = incoming_gradients_ = 0;
  }
  reported_ = true;
  return arrival_.gradients;
}

int Bucket::ReportPending() {
  // A running round uses the buffer outgoing_. So contributions that come meanwhile are announced after the round.
  if (state_ == State::kRunning) return 0;
  if (reported()) return 0;
  ForgetCleared();
  if (options_.late == Late::kKeep) {
    // While an arrival is not reported, its model stays in the buffer incoming_. If the arrival is on time, the model
    // goes into the next round. Otherwise the model waits for a later round.
    if (incoming_gradients_ > 0 && state_ != State::kArrived) {
      std::swap(outgoing_, incoming_);
      outgoing_gradients_ = std::exchange(incoming_gradients_, 0);
      outgoing_late_ += std::exchange(incoming_late_, 0);
    }
    return outgoing_gradients_;
  }
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

// Multiplies the contribution by this rank's weight, so that the sum over all ranks is a weighted average. The weight
// follows from Closing::Contribution::work of the ranks that have arrived.
void Bucket::Weigh(Rank rank) {
  std::vector<int> work;
  std::size_t mine = 0;
  for (const Rank member : last_.members(rank)) {
    const auto& contribution = last_.contributions[Index(member)];
    if (member == rank) mine = work.size();
    if (contribution.fresh) work.push_back(contribution.work);
  }
  const auto weights = options_.weights == Weights::kStaleness ? StalenessWeights(work, options_.weight_parameter)
                                                               : ContractionWeights(work, options_.weight_parameter);
  memory().Scale(options_.type, arrival_.output, options_.elements, weights.at(mine));
  if (options_.weights == Weights::kStaleness) iteration_ = *std::max_element(work.begin(), work.end());
}

Bucket::Entry Bucket::Begin(const Closing& closing, Rank rank) {
  const auto& mine = closing.contributions.at(Index(rank));
  const bool announced = reported();
  Entry entry;
  if (!closing.Includes(rank)) {
    entry.member = false;
    const bool nobody = GroupsOf(closing.groups).empty();  // a round without ranks does not count
    completed_ = std::max(completed_, closing.round + (nobody ? 0 : 1));
    return entry;
  }
  const int gradients = announced ? arrival_.gradients : outgoing_gradients_;
  // `mine.gradients` may be 0 for a kept model that is too old, or 1 for one that this rank has forgotten since then.
  const bool kept = options_.late == Late::kKeep && !announced && (mine.gradients == 0 || !outgoing_.empty());
  if (state_ == State::kRunning || mine.fresh != announced || (mine.gradients != gradients && !kept)) {
    throw std::logic_error("round " + std::to_string(closing.round) + " of " + name_ + " on rank " +
                           std::to_string(rank) + " was closed with another contribution than the rank announced");
  }
  if (options_.missed == Missed::kReplay) lost_ += closing.round - completed_;  // rounds before the rank's first round
  last_ = closing;
  declared_ = true;
  members_gradients_ = closing.gradients(rank);
  if (announced) {
    wants_full_round_ = false;
    on_time_ = true;
    if (options_.weights != Weights::kUniform) Weigh(rank);
    if (options_.late == Late::kKeep && !only_delivers_) {
      std::swap(outgoing_, incoming_);
      outgoing_gradients_ = std::exchange(incoming_gradients_, 0);
      outgoing_late_ = incoming_late_ = 0;
    }
    entry.input = arrival_.input;
    entry.output = arrival_.output;
  } else {
    on_time_ = false;
    if (state_ == State::kArrived && !closing.ends) {
      ++incoming_late_;
      if (!only_delivers_) AddPending(arrival_);
    }
    Buffer& output = options_.late == Late::kKeep ? scratch_ : outgoing_;
    output.Reserve(bytes(), memory());
    if (mine.gradients == 0) output.Zero();
    entry.output = output.data();
    entry.input = mine.gradients == 0 ? output.data() : outgoing_.data();
    outgoing_late_ = 0;
  }
  state_ = State::kRunning;
  return entry;
}

bool Bucket::Finish() {
  const bool kept = options_.late == Late::kKeep;
  const bool replays = options_.missed == Missed::kReplay;
  Buffer& late_result = kept ? scratch_ : outgoing_;
  void* result = on_time_ ? arrival_.output : late_result.data();
  // A missed sum of models is divided later, because TakeMissed first adds a newer model of this rank.
  const bool divides = options_.divisor == Divisor::kContributors && options_.weights == Weights::kUniform;
  if (divides && !(kept && !on_time_) && members_gradients_ > 1)
    memory().Scale(options_.type, result, options_.elements, 1.0 / members_gradients_);
  completed_ = last_.round + 1;
  state_ = State::kIdle;
  const bool left_out = std::exchange(left_out_, false);
  if (left_out) ++lost_;
  if (on_time_ && !only_delivers_) {
    held_ = replays && !left_out;
    held_gradients_ = members_gradients_;
    return true;
  }
  if (on_time_) {
    late_result.Reserve(bytes(), memory());
    memory().Copy(late_result.data(), arrival_.output, bytes());
  } else if (!kept) {
    outgoing_gradients_ = 0;
    cleared_ = false;
  }
  // The result of a round without gradients is not kept: an optimizer step with zeros would still change the model.
  const bool empty = std::exchange(discard_result_, false) || members_gradients_ == 0;
  if (left_out) return false;
  if (!empty) {
    missed_.Push(late_result, members_gradients_, options_.type, options_.elements);
  } else if (replays) {
    missed_.PushEmpty();
  }
  return false;
}

void Bucket::LeaveOut(Round completed) {
  const Round before = taken();
  if (options_.missed != Missed::kReplay) return;
  completed_ = std::max(completed_, completed);
  lost_ += completed_ - before;
  held_ = false;
  missed_.Clear();
  left_out_ = state_ == State::kRunning;
}

void Bucket::Clear(Round complete) {
  incoming_gradients_ = 0;
  if (options_.missed == Missed::kReplay) {
    if (std::exchange(held_, false)) missed_.PushEmpty();  // the order of results does not matter: all become empty
    lost_ += std::max<Round>(complete - taken(), 0);
    while (!missed_.empty() && taken() < complete) missed_.Pop();
    missed_.MakeEmpty();
  } else {
    missed_.Clear();
  }
  iteration_ = 0;
  if (state_ == State::kRunning) discard_result_ = !on_time_ || only_delivers_;
  if (options_.late == Late::kKeep) {
    outgoing_gradients_ = 0;  // outgoing_ stays unchanged: a round may count the kept model until the next report
  } else if (state_ != State::kRunning && outgoing_gradients_ > 0) {
    outgoing_.Zero();
    cleared_ = true;
  }
  wants_full_round_ = declared_;
}

}  // namespace horovod_partial
