// One rank's half of the round protocol (docs/protocol.md): what it contributes, and what it gets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/rounds/bucket_spec.h"
#include "core/rounds/message.h"
#include "core/rounds/missed.h"
#include "core/values/buffer.h"
#include "core/values/dtype.h"
#include "core/values/memory.h"
#include "core/values/types.h"

namespace horovod_partial {

struct BucketOptions : Handling {
  Memory* memory = &Memory::Host();  // where the contributions and results lie
  DataType type = DataType::kFloat32;
  std::size_t elements = 0;
};

// The state machine of one bucket on one rank. Not thread-safe: the engine holds the bucket's lock around every call.
//
//            Arrive (on time)            Begin, own entry            Finish
//     kIdle ------------------> kArrived ----------------> kRunning --------> kIdle
//       |                          |                           ^
//       |                          | Begin, not named:         |
//       |                          | the arrival becomes late  |
//       +--------------------------+---------------------------+
//                  Begin, late entry
//
// A round may leave this rank out (its group is empty): then nothing changes, and an arrival goes on waiting.
//
// Buffers. Each is as large as the bucket, and is allocated when it is first needed. Only a late rank needs any:
//   outgoing_  the pending sum that was announced; while a late entry runs, the reduction's input and output
//   incoming_  contributions that came after the announcement
//   missed_    results that the application has not taken (one buffer, or several with Missed::kReplay)
// With Late::kKeep every rank has them, and they hold models: outgoing_ the one that is sent in rounds without an
// arrival, incoming_ a newer one. There is one buffer more:
//   scratch_   the result of such a round, so that it does not overwrite the kept model
// A contribution that is on time is sent from where it lies, and its result arrives where the application wants it.
//
// With Missed::kReplay the bucket belongs to a family. Its results are kept in order until the application takes them
// with TakeRounds, together with those of the other members (docs/protocol.md, families). The result of an arrival that
// was on time counts as one of them, although it lies in the application's memory.
class Bucket {
 public:
  enum class State : std::uint8_t { kIdle, kArrived, kRunning };

  // The application's memory. `input` is null if the arrival only delivers what is pending. Then the result goes to the
  // missed ones, and `output` is working memory.
  struct Arrival {
    const void* input = nullptr;
    void* output = nullptr;
    int gradients = 0;
    int work = 0;  // the number that its weight follows from; with Weights::kStaleness the bucket sets it
  };
  enum class Arrived : std::uint8_t {
    kOnTime,   // the next report tells the coordinator; after Finish the result is in the arrival's output
    kLate,     // the contribution is pending, and TakeMissed can take the missed results now
    kWaiting,  // the contribution is pending while a round runs; TakeMissed can take its result after Finish
    kBusy,     // nothing was done: an arrival is outstanding, or its result has not been taken
  };
  // What this rank reduces in a round.
  struct Entry {
    bool own = false;    // true: the arrival; false: what is pending, or zeros
    bool member = true;  // false: this rank reduces nothing
    const void* input = nullptr;
    void* output = nullptr;
  };

  Bucket(std::string name, const BucketOptions& options);

  // Application's thread.
  Arrived Arrive(const Arrival& arrival);
  // The outstanding arrival has more gradients in its memory. The next report tells how many.
  void Add(int gradients) {
    arrival_.gradients += gradients;
    reported_ = false;
  }
  // Writes what was missed to `output`: the sum of all results, or the newest one. Not for kReplay. Returns false if it
  // is a sum in float16 that is not finite.
  bool TakeMissed(void* output);
  // With kReplay: writes the sum of the oldest untaken results, those of `rounds` rounds, to `output`. Returns how many
  // gradients are in it. If there are none, writes zeros.
  int TakeRounds(int rounds, void* output);

  // Background thread, once in every negotiating cycle: the coordinator hears of the arrival, so its contribution is
  // complete now. Returns how many gradients are in it.
  int ReportArrival();
  // The coordinator has forgotten the arrival, because this rank has joined. It will be reported again.
  void Unreport() { reported_ = false; }
  // Announces what is pending. Returns how many gradients that is.
  int ReportPending();
  // Late arrivals that ReportPending has announced and no round has seen.
  int ReportLate() const { return options_.late == Late::kKeep ? outgoing_late_ : outgoing_gradients_; }

  // Background thread: a round has closed. Returns what this rank reduces in it.
  Entry Begin(const Closing& closing, Rank rank);
  // The reduction has succeeded. Returns true if the result is in the arrival's output, false if it counts as missed.
  bool Finish();

  // Forgets what is pending and missed, for example when a checkpoint is loaded. The next arrival asks for a full
  // round. A closing may still count a contribution that the coordinator has heard of in this cycle: then zeros are
  // delivered. With kReplay the rounds from `complete` on keep their numbers, without a result: other members have not
  // ended them here.
  void Clear(Round complete = 0);
  // Call it if no thread will take the missed results.
  void DiscardMissed() { missed_.Clear(); }
  // With kReplay: this rank has joined. It gets no results, also not that of a running round. `completed`: how many
  // rounds have ended elsewhere.
  void LeaveOut(Round completed);
  // With Weights::kStaleness: raises the iteration of this rank's model to at least `iteration`. Returns the new one.
  int CatchUp(int iteration) { return iteration_ = std::max(iteration_, iteration); }

  State state() const { return state_; }
  const Arrival& arrival() const { return arrival_; }  // valid in kArrived
  const std::string& name() const { return name_; }
  Memory& memory() const { return *options_.memory; }
  const BucketOptions& options() const { return options_; }
  std::size_t bytes() const { return options_.elements * SizeOf(options_.type); }
  bool declared() const { return declared_; }                               // a round of this bucket has closed
  bool reported() const { return state_ == State::kArrived && reported_; }  // the coordinator knows of the arrival
  bool wants_full_round() const { return wants_full_round_; }
  bool HasPending() const {  // late contributions that a round will deliver
    return options_.late == Late::kAccumulate && (cleared_ ? 0 : outgoing_gradients_) + incoming_gradients_ > 0;
  }
  bool HasUnannounced() const { return incoming_gradients_ > 0; }
  bool HasMissed() const { return !missed_.empty(); }
  int missed_rounds() const { return missed_.rounds(); }
  int missed_gradients() const { return missed_.gradients(); }
  int summed() const { return missed_.summed(); }  // missed rounds that had to be added to others
  // With kReplay: rounds whose results the application never gets, or gets only in a sum with others.
  Round lost() const { return missed_.summed() + lost_; }
  // With kReplay: how many rounds have untaken results, and how many of them are in the oldest result.
  int untaken() const { return missed_.rounds() + (held_ ? 1 : 0); }
  int oldest_rounds() const { return held_ ? 1 : missed_.oldest_rounds(); }
  // With kReplay: how many rounds' results were taken. Otherwise: how many rounds have ended.
  Round taken() const { return options_.missed == Missed::kReplay ? completed_ - untaken() : completed_; }
  // See MissedResults::BeTaken.
  void BeTaken(bool being_taken) { missed_.BeTaken(being_taken); }
  bool full() const { return options_.missed == Missed::kReplay && untaken() >= options_.replay_limit; }
  Round completed() const { return completed_; }  // rounds that have ended here
  const Closing& last() const { return last_; }   // the running round, or else the last one
  int dropped() const { return dropped_; }        // late contributions that were not finite
  int iteration() const { return iteration_; }
  std::size_t held_bytes() const { return outgoing_.size() + incoming_.size() + scratch_.size() + missed_.bytes(); }

 private:
  void AddPending(const Arrival& arrival);
  void Keep(const void* model);
  void Weigh(Rank rank);
  void ForgetCleared();
  void MergePendingInto(Arrival& arrival);

  std::string name_;
  BucketOptions options_;
  State state_ = State::kIdle;
  bool declared_ = false;
  Round completed_ = 0;
  Closing last_;

  Arrival arrival_;  // valid in kArrived, and in kRunning if on_time_
  bool only_delivers_ = false;
  bool reported_ = false;  // the coordinator knows of arrival_
  bool on_time_ = false;   // kRunning: the entry is the arrival
  bool wants_full_round_ = false;
  bool discard_result_ = false;  // kRunning: Clear was called since, so the result is not kept as missed
  bool left_out_ = false;        // kRunning, kReplay: this rank has joined since, so it does not get the result
  bool cleared_ = false;    // outgoing_ has been forgotten, but a round that counts it may close until the next report
  bool held_ = false;       // kReplay: a result in the arrival's output has not been taken
  int held_gradients_ = 0;  // in that result
  Round lost_ = 0;          // kReplay: rounds that ended while this rank had joined, or were forgotten
  int members_gradients_ = 0;  // kRunning: gradients in the sum that this rank gets
  int missed_gradients_ = 0;   // kKeep: models in the missed result
  int incoming_late_ = 0;      // kKeep: late arrivals in incoming_
  int outgoing_late_ = 0;      // kKeep: late arrivals in outgoing_ that no round has seen
  int iteration_ = 0;          // Weights::kStaleness: the iteration of this rank's model

  Buffer outgoing_;
  int outgoing_gradients_ = 0;
  Buffer incoming_;
  int incoming_gradients_ = 0;
  Buffer scratch_;
  MissedResults missed_;
  int dropped_ = 0;
};

}  // namespace horovod_partial
