// One rank's half of the round protocol (docs/protocol.md): what the rank contributes, and what it gets.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/rounds/bucket_spec.h"
#include "core/rounds/message.h"
#include "core/rounds/missed.h"
#include "core/values/dtype.h"
#include "core/values/memory.h"
#include "core/values/types.h"

namespace horovod_partial {

struct BucketOptions : Handling {
  Memory* memory = &Memory::Host();  // the memory in which contributions and results lie, of the host or a GPU
  DataType type = DataType::kFloat32;
  std::size_t elements = 0;
};

// The state machine of one bucket on one rank. Not thread-safe: callers must hold the bucket's lock around every call.
//
//            Arrive (on time)        Begin, with the arrival         Finish
//     kIdle ------------------> kArrived ----------------> kRunning --------> kIdle
//       |                          |                           ^
//       |                          | Begin, without it:        |
//       |                          | the arrival becomes late  |
//       +--------------------------+---------------------------+
//                Begin, without an arrival
//
// If a round leaves this rank out, because the rank is in no group, the state of the bucket stays as it is. An arrival
// then waits for a later round.
//
// A rank that is on time needs no buffer: its contribution is sent from where it lies, and the result is written where
// the application wants it. The buffers are allocated when they are first needed, each as large as the bucket:
//   outgoing_  the pending sum that a report has announced; input and output of the round that delivers the sum
//   incoming_  contributions that came after that report
//   missed_    results that the application has not taken (one buffer, or several with Missed::kReplay)
// With Late::kKeep every rank has buffers, and they hold models:
//   outgoing_  the kept model
//   incoming_  a newer model that no round has seen
//   scratch_   the result of a round without an arrival, so that the result does not overwrite the kept model
//
// With Missed::kReplay the bucket belongs to a family: the buckets of one optimizer (docs/protocol.md, families). Its
// results are kept in order until the application takes them with TakeRounds, together with those of the other buckets.
// The result of an arrival on time counts as such a result too, although it lies in the application's memory.
class Bucket {
 public:
  enum class State : std::uint8_t { kIdle, kArrived, kRunning };

  // An arrival, with pointers to the application's memory. `input` is null if the arrival only delivers the pending
  // sum. The result of such an arrival counts as missed, and its `output` is working memory.
  struct Arrival {
    const void* input = nullptr;
    void* output = nullptr;
    int gradients = 0;
    // The number from which the weight of a model follows: how many steps the rank has taken. With Weights::kStaleness
    // it is the iteration of the model instead, and the bucket fills it in.
    int work = 0;
  };
  enum class Arrived : std::uint8_t {
    kOnTime,   // the next report announces the arrival; after Finish its result is in the output of the arrival
    kLate,     // the contribution is pending, and TakeMissed can be called now
    kWaiting,  // a round runs, so the contribution is pending. When Finish has ended the round, call TakeMissed
    kBusy,     // the arrival was refused: the result of an earlier arrival has not come yet, or has not been taken
  };
  // What this rank reduces in a round: its arrival if it is on time, else its pending sum, or zeros.
  struct Entry {
    bool member = true;  // false if this rank takes no part in the round
    const void* input = nullptr;
    void* output = nullptr;
  };

  Bucket(std::string name, const BucketOptions& options);

  // Hands over a contribution. Called on the application's thread.
  Arrived Arrive(const Arrival& arrival);
  // Under work sharing: records that `gradients` more gradients were added to the arrival. The next report counts them.
  void Add(int gradients) {
    arrival_.gradients += gradients;
    reported_ = false;
  }
  // Not for kReplay. Writes the missed results to `output`: their sum, or only the newest result. Returns false if the
  // sum is in float16 and not finite.
  bool TakeMissed(void* output);
  // With kReplay: writes the sum of the results of the oldest `rounds` untaken rounds to `output`. Returns the number
  // of gradients in the sum. If there is no gradient, it writes zeros.
  int TakeRounds(int rounds, void* output);
  // With kReplay: returns true if TakeRounds writes to `output`. It does not if the only result that it takes, that of
  // an arrival on time, lies there.
  bool Writes(int rounds, const void* output) const { return !held_ || rounds > 1 || arrival_.output != output; }

  // Called on the background thread when a report announces the arrival. Adds the pending sum to the contribution, and
  // returns the number of gradients in both.
  int ReportArrival();
  // Called when the coordinator forgot the arrival, because this rank has joined. The arrival will be reported again.
  void Unreport() { reported_ = false; }
  // Called when a report announces the pending sum. Returns the number of gradients in the pending sum.
  int ReportPending();
  // Returns the number of late arrivals that ReportPending has announced. None of them is in a round yet.
  int ReportLate() const { return options_.late == Late::kKeep ? outgoing_late_ : outgoing_gradients_; }

  // Called on the background thread when a round has closed. Returns what this rank reduces in the round.
  Entry Begin(const Closing& closing, Rank rank);
  // Called when the reduction has succeeded. Returns true if the result is in the arrival's output, false if it is a
  // missed result.
  bool Finish();

  // Forgets the pending sum and the missed results, for example when a checkpoint is loaded. The next arrival asks for
  // a round that waits for all ranks. A round that closes before the next report delivers zeros instead of the pending
  // sum. With kReplay, `complete` rounds have ended in all buckets; later rounds still count, but without results.
  void Clear(Round complete = 0);
  // Called when the owner of the bucket (an optimizer) is gone, so that no thread will take the missed results.
  void DiscardMissed() { missed_.Clear(); }
  // With kReplay: records that this rank has joined, and so gets no more results, not even that of a running round.
  // `completed` is the number of rounds that have ended on other ranks.
  void LeaveOut(Round completed);
  // With Weights::kStaleness: raises the iteration of this rank's model to at least `iteration`, and returns it.
  int CatchUp(int iteration) { return iteration_ = std::max(iteration_, iteration); }

  State state() const { return state_; }
  const Arrival& arrival() const { return arrival_; }  // the present arrival; valid in state kArrived
  const std::string& name() const { return name_; }
  Memory& memory() const { return *options_.memory; }
  const BucketOptions& options() const { return options_; }
  std::size_t bytes() const { return options_.elements * SizeOf(options_.type); }
  bool declared() const { return declared_; }  // true once round 0 has closed, in which ranks agree on the declaration
  bool reported() const { return state_ == State::kArrived && reported_; }  // true if a report announced the arrival
  bool wants_full_round() const { return wants_full_round_; }
  bool HasPending() const {  // true if there are late contributions that a round will deliver
    return options_.late == Late::kAccumulate && (cleared_ ? 0 : outgoing_gradients_) + incoming_gradients_ > 0;
  }
  bool HasUnannounced() const { return incoming_gradients_ > 0; }
  bool HasMissed() const { return !missed_.empty(); }
  int missed_rounds() const { return missed_.rounds(); }
  int missed_gradients() const { return missed_.gradients(); }
  // The number of missed rounds whose results were added to another result.
  int summed() const { return missed_.summed(); }
  // With kReplay: the number of rounds whose results the application never gets, or gets only in a sum of rounds.
  Round lost() const { return missed_.summed() + lost_; }
  // With kReplay: the number of rounds with untaken results, and the number of rounds in the oldest of these results.
  int untaken() const { return missed_.rounds() + (held_ ? 1 : 0); }
  int oldest_rounds() const { return held_ ? 1 : missed_.oldest_rounds(); }
  // With kReplay: the number of rounds whose results were taken. Otherwise: the number of rounds that have ended.
  Round taken() const { return options_.missed == Missed::kReplay ? completed_ - untaken() : completed_; }
  void BeTaken(bool being_taken) { missed_.BeTaken(being_taken); }
  bool full() const { return options_.missed == Missed::kReplay && untaken() >= options_.replay_limit; }
  Round completed() const { return completed_; }  // the number of rounds that have ended on this rank
  const Closing& last() const { return last_; }   // the Closing message of the running round, or else of the last
  int dropped() const { return dropped_; }        // how many late contributions were dropped, as not finite
  std::size_t held_bytes() const { return outgoing_.size() + incoming_.size() + scratch_.size() + missed_.bytes(); }

 private:
  void AddPending(const Arrival& arrival);
  void Weigh(Rank rank);
  void ForgetCleared();

  std::string name_;
  BucketOptions options_;
  State state_ = State::kIdle;
  bool declared_ = false;
  Round completed_ = 0;
  Closing last_;

  Arrival arrival_;  // the present arrival; valid in state kArrived, and in kRunning if `on_time_`
  bool only_delivers_ = false;
  bool reported_ = false;  // true if the coordinator knows of the arrival
  bool on_time_ = false;   // while a round runs: true if its sum contains this rank's arrival
  bool wants_full_round_ = false;
  bool discard_result_ = false;  // while a round runs: true if Clear was called, so the result will not be kept
  bool left_out_ = false;        // while a round runs: true if this rank has joined, so it gets no result
  // True if Clear has emptied a pending sum that a report had announced. The coordinator learns of this by the next
  // report. A round that closes earlier may still count the gradients that were in the sum.
  bool cleared_ = false;
  bool held_ = false;          // with kReplay: true if the result in the output of the arrival has not been taken
  int held_gradients_ = 0;     // the number of gradients in the untaken result of the arrival
  Round lost_ = 0;             // with kReplay: the number of rounds that were forgotten, or ended during a join
  int members_gradients_ = 0;  // while a round runs: the number of gradients in the sum that this rank gets
  int incoming_late_ = 0;      // for models: the number of late arrivals that no report has announced
  int outgoing_late_ = 0;      // for models: the number of late arrivals that were announced but are in no round
  int iteration_ = 0;          // with Weights::kStaleness: the iteration of this rank's model

  Buffer outgoing_;
  int outgoing_gradients_ = 0;
  Buffer incoming_;
  int incoming_gradients_ = 0;
  Buffer scratch_;
  MissedResults missed_;
  int dropped_ = 0;
};

}  // namespace horovod_partial
