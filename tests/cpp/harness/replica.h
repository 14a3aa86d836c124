// One bucket on one rank of a simulated job, with a model of what should be in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/rounds/bucket.h"
#include "core/rounds/message.h"
#include "harness/explorer.h"
#include "harness/program.h"

namespace horovod_partial::test {

// A sum of contributions: two bits for each, so that a sum tells which are in it, and whether one is in it twice.
using Sum = std::int64_t;

inline Sum Contribution(Rank rank, int bucket, int step) {
  return Sum{1} << (2 * ((bucket * kMostSteps + step) * kMostRanks + rank));
}

inline bool HasDuplicates(Sum sum) {
  constexpr Sum kOnes = 0x15555555555555;  // 27 digits
  return (sum & ~kOnes) != 0;
}

// Buckets cannot be copied, and the explorer must: a copy is made by replaying the calls. Checks every answer of the
// bucket against a model.
class Replica {
 public:
  Replica(int index, const Handling& handling) : index_(index), handling_(handling) { MakeBucket(); }
  Replica(const Replica& other)
      : model(other.model), index_(other.index_), handling_(other.handling_), calls_(other.calls_) {
    MakeBucket();
    for (const Call& call : calls_) Run(call);
  }
  Replica& operator=(const Replica&) = delete;

  // What should be in the bucket. With Late::kKeep what is pending are models: the newest one that has been announced,
  // which is sent again and again, and a newer one.
  struct Model {
    Sum later = 0;  // pending, not announced
    int later_gradients = 0;
    Sum announced = 0;  // pending, announced
    int announced_gradients = 0;
    Sum arrival = 0;  // of the outstanding on-time arrival
    int arrival_gradients = 0;
    bool outstanding = false;  // an arrival waits for its result
    bool delivers = false;     // and only delivers: its result is left among the missed ones
    bool missed = false;
    struct Untaken {
      Sum sum;
      int gradients;
    };
    std::vector<Untaken> untaken;  // of a family: by round, oldest first
    bool held = false;             // and the oldest is that of an arrival which was on time
    Sum finished = 0;              // all rounds that have ended here, added up; the last one, with Late::kKeep
    Sum seen = 0;                  // all results that the application has got, added up; the last one, with Late::kKeep
    bool excused = false;          // it has joined or cleared once, and did not get what was reduced meanwhile
    bool cleared = false;          // what is announced is zeros, and is not announced again
    bool discards = false;         // the result of the round that runs is not wanted
    bool left_out = false;         // nor is its number: the rank has joined since
    bool wants_full = false;       // with its next arrival
  };
  Model model;

  const Bucket& bucket() const { return *bucket_; }

  // A contribution of 0 is an arrival that only delivers.
  Bucket::Arrived Arrive(Sum contribution) {
    const bool running = bucket_->state() == Bucket::State::kRunning;
    const int gradients = contribution != 0 ? 1 : 0;
    Require(!model.outstanding, "the program arrives while an arrival is outstanding");
    const Bucket::Arrived arrived = Do({Call::kArrive, contribution, nullptr}).arrived;
    Require(!model.held, "the program arrives before it has taken the result of its last arrival");
    const auto expected = running                             ? Bucket::Arrived::kWaiting
                          : model.missed && contribution != 0 ? Bucket::Arrived::kLate
                                                              : Bucket::Arrived::kOnTime;
    Require(arrived == expected, "an arrival is on time, late or waiting against the rules");
    if (arrived == Bucket::Arrived::kOnTime) {
      model.arrival = contribution;
      model.arrival_gradients = gradients;
    } else if (!keeps()) {
      model.later += contribution;
      model.later_gradients += gradients;
    }
    if (keeps()) {
      model.later = contribution;
      model.later_gradients = 1;
    }
    model.outstanding = arrived != Bucket::Arrived::kLate;
    model.delivers = model.outstanding && contribution == 0;
    if (arrived == Bucket::Arrived::kLate && !in_family()) Take();
    CheckPending();
    return arrived;
  }

  // Of a family: so many rounds, as one result.
  void TakeRounds(int rounds) {
    Sum sum = 0;
    int gradients = 0;
    for (int i = 0; i < rounds; ++i) {
      sum += model.untaken[static_cast<std::size_t>(i)].sum;
      gradients += model.untaken[static_cast<std::size_t>(i)].gradients;
    }
    model.untaken.erase(model.untaken.begin(), model.untaken.begin() + rounds);
    model.held = false;
    model.missed = !model.untaken.empty();
    Require(Do({Call::kTakeRounds, rounds, nullptr}).gradients == gradients, "a taken round has other gradients");
    Require(last_result_ == sum, "a taken result is not that of the round");
    GotResult();
  }

  // The application gets what it has missed.
  void Take() {
    Do({Call::kTake, 0, nullptr});
    if (std::exchange(model.missed, false)) {
      GotResult();
    } else {
      Require(last_result_ == 0, "a result is taken where none was missed");
    }
  }

  // Forgets what is pending, and gives it: nobody will get it.
  Sum Clear(Round complete) {
    Require(!model.outstanding, "the program clears while an arrival is outstanding");
    const bool running = bucket_->state() == Bucket::State::kRunning;
    const auto gone = std::max<Round>(complete - bucket_->taken(), 0);
    Do({Call::kClear, complete, nullptr});
    if (in_family()) {
      model.untaken.erase(model.untaken.begin(), model.untaken.begin() + gone);
      for (auto& untaken : model.untaken) untaken = {0, 0};
      model.held = false;
    }
    Sum forgotten = 0;
    model.later_gradients = 0;
    if (keeps()) {
      model.announced_gradients = 0;
    } else {
      forgotten = std::exchange(model.later, 0) + (running ? 0 : std::exchange(model.announced, 0));
      model.cleared = model.cleared || (!running && model.announced_gradients > 0);
    }
    model.discards = running;
    model.missed = !model.untaken.empty();
    model.excused = true;
    model.wants_full = bucket_->declared();
    CheckPending();
    return forgotten;
  }

  int ReportArrival() {
    ForgetCleared();
    const int gradients = Do({Call::kReportArrival, 0, nullptr}).gradients;
    if (!keeps()) {
      model.arrival += model.announced + model.later;
      model.arrival_gradients += model.announced_gradients + model.later_gradients;
      model.announced = model.later = 0;
      model.announced_gradients = model.later_gradients = 0;
    }
    Require(gradients == model.arrival_gradients, "an arrival reports another number of gradients than it has");
    CheckPending();
    return gradients;
  }

  int ReportPending() {
    if (bucket_->state() != Bucket::State::kRunning && !bucket_->reported()) ForgetCleared();
    const int gradients = Do({Call::kReportPending, 0, nullptr}).gradients;
    if (keeps()) {
      if (model.later_gradients > 0 && bucket_->state() != Bucket::State::kArrived) AnnounceModel();
    } else if (!bucket_->reported()) {
      model.announced += std::exchange(model.later, 0);
      model.announced_gradients += std::exchange(model.later_gradients, 0);
    }
    Require(gradients == (bucket_->reported() ? 0 : model.announced_gradients),
            "another number of gradients is announced than is pending");
    return gradients;
  }

  // The round begins. Gives the entry's input; `slipped` says whether an arrival came too late for it.
  Sum Begin(const std::shared_ptr<const Closing>& closing, Rank rank, bool& slipped) {
    const Closing::Contribution& mine = closing->contributions[static_cast<std::size_t>(rank)];
    slipped = bucket_->state() == Bucket::State::kArrived && !mine.fresh;
    const Bucket::Entry entry = Do({Call::kBegin, rank, closing}).entry;
    Require((entry.output == Output()) == mine.fresh, "the entry is not what the closing says");
    if (mine.fresh) model.wants_full = false;
    if (mine.fresh && keeps()) AnnounceModel();
    if (slipped) {
      const Sum arrival = std::exchange(model.arrival, 0);
      const int gradients = std::exchange(model.arrival_gradients, 0);
      if (!keeps()) {
        model.later += arrival;
        model.later_gradients += gradients;
      }
    }
    const Sum input = *static_cast<const Sum*>(entry.input);
    Require(input == DueFrom(mine), "another sum is sent than is due");
    return input;
  }
  // What the closing makes of this rank: its arrival, or what it has announced.
  Sum DueFrom(const Closing::Contribution& contribution) const {
    if (contribution.fresh) return model.arrival;
    return keeps() && contribution.gradients == 0 ? 0 : model.announced;
  }
  // A round has closed in which this rank is in no group: nothing happens to it.
  void LeaveOut(const std::shared_ptr<const Closing>& closing, Rank rank) {
    const Bucket::State state = bucket_->state();
    Require(!Do({Call::kBegin, rank, closing}).entry.member, "a rank that is in no group takes part");
    Require(bucket_->state() == state, "a round changes a rank that is in none of its groups");
  }

  // This rank has joined, and so many rounds have closed.
  void LeaveOut(Round completed) {
    if (!in_family()) return;
    Do({Call::kLeaveOut, completed, nullptr});
    model.untaken.clear();
    model.held = model.missed = false;
    model.left_out = bucket_->state() == Bucket::State::kRunning;
  }

  // The round, whose sum is `result`, ends.
  void Finish(Rank rank, Sum input, Sum result) {
    Require(*static_cast<const Sum*>(entry_.input) == input, "what was being sent has been written");
    const bool on_time = Do({Call::kFinish, result, nullptr}).on_time;
    const bool fresh = bucket_->last().contributions[static_cast<std::size_t>(rank)].fresh;
    Require(on_time == (fresh && !model.delivers), "a result went to the wrong place");
    const bool news = bucket_->last().gradients(rank) > 0;
    if (news) model.finished = result + (keeps() ? 0 : model.finished);
    if (fresh) {
      model.arrival = 0;
      model.arrival_gradients = 0;
    } else if (!keeps()) {
      model.announced = 0;
      model.announced_gradients = 0;
      model.cleared = false;
    }
    const bool discards = std::exchange(model.discards, false);
    if (std::exchange(model.left_out, false)) {
      // Nobody takes it.
    } else if (in_family()) {
      const bool empty = !on_time && (discards || !news);
      model.held = on_time;
      model.untaken.push_back({empty ? 0 : result, empty ? 0 : bucket_->last().gradients(rank)});
      model.missed = model.missed || !on_time;
    } else if (on_time) {
      GotResult();
    } else {
      model.missed = model.missed || (news && !discards);
      Require(bucket_->HasMissed() == model.missed, "a result is missed, or not, against the rules");
      if (model.outstanding && !model.delivers) Take();
    }
    Require(!in_family() || bucket_->untaken() == static_cast<int>(model.untaken.size()), "a round is not counted");
    model.outstanding = model.delivers = false;
    CheckPending();
  }

  void CheckSeen() const {
    Require(model.excused || !model.untaken.empty() || model.seen == model.finished,
            "the results that a rank got are not those of the rounds");
  }

 private:
  struct Call {
    enum Kind : std::uint8_t {
      kArrive,
      kTake,
      kTakeRounds,
      kReportArrival,
      kReportPending,
      kBegin,
      kFinish,
      kClear,
      kLeaveOut
    } kind;
    Sum value;  // kArrive: contribution, kTakeRounds: rounds, kBegin: rank, kFinish: result, kClear: complete rounds,
                // kLeaveOut: completed
    std::shared_ptr<const Closing> closing;
  };
  struct Answer {
    Bucket::Arrived arrived{};
    int gradients = 0;
    Bucket::Entry entry;
    bool on_time = false;
  };

  void MakeBucket() {
    BucketOptions options;
    options.type = DataType::kInt64;
    options.elements = 1;
    static_cast<Handling&>(options) = handling_;
    bucket_ = std::make_unique<Bucket>(NameOf(index_), options);
  }

  Answer Do(const Call& call) {
    const bool changed_pending = model.later_gradients > 0 || forgets_;
    Answer answer;
    try {
      answer = Run(call);
    } catch (const std::logic_error& error) {
      throw Violation(error.what());
    }
    if (call.kind != Call::kReportPending || changed_pending) calls_.push_back(call);
    return answer;
  }

  // The first bucket is reduced in place, the others from one memory to another.
  Answer Run(const Call& call) {
    Answer answer;
    switch (call.kind) {
      case Call::kArrive:
        input_ = call.value;
        answer.arrived = bucket_->Arrive({call.value == 0 ? nullptr : &input_, Output(), call.value == 0 ? 0 : 1});
        break;
      case Call::kTake:
        bucket_->TakeMissed(Output());
        last_result_ = *Output();
        break;
      case Call::kTakeRounds:
        answer.gradients = bucket_->TakeRounds(static_cast<int>(call.value), Output());
        last_result_ = *Output();
        break;
      case Call::kReportArrival: answer.gradients = bucket_->ReportArrival(); break;
      case Call::kReportPending: answer.gradients = bucket_->ReportPending(); break;
      case Call::kBegin: answer.entry = entry_ = bucket_->Begin(*call.closing, static_cast<Rank>(call.value)); break;
      case Call::kFinish:
        *static_cast<Sum*>(entry_.output) = call.value;
        answer.on_time = bucket_->Finish();
        if (answer.on_time) last_result_ = *Output();
        break;
      case Call::kClear: bucket_->Clear(call.value); break;
      case Call::kLeaveOut: bucket_->LeaveOut(call.value); break;
    }
    return answer;
  }

  bool keeps() const { return handling_.late == Late::kKeep; }
  bool in_family() const { return handling_.missed == Missed::kReplay; }
  void AnnounceModel() {
    model.announced = model.later;
    model.announced_gradients = std::exchange(model.later_gradients, 0);
  }
  void GotResult() {
    model.seen = last_result_ + (keeps() ? 0 : model.seen);
    CheckSeen();
  }
  void CheckPending() const {
    const int announced = model.cleared ? 0 : model.announced_gradients;
    Require(bucket_->HasPending() == (!keeps() && model.later_gradients + announced > 0),
            "something is pending, or not, against the rules");
  }
  void ForgetCleared() {
    forgets_ = std::exchange(model.cleared, false);
    if (forgets_) model.announced_gradients = 0;
  }
  Sum* Output() { return index_ == 0 ? &input_ : &output_; }

  const int index_;
  const Handling handling_;
  std::vector<Call> calls_;
  bool forgets_ = false;  // the report that is being made is the first one since a Clear
  std::unique_ptr<Bucket> bucket_;
  Sum input_ = 0;  // the application's memory
  Sum output_ = 0;
  Sum last_result_ = 0;
  Bucket::Entry entry_;  // of the round that runs
};

}  // namespace horovod_partial::test
