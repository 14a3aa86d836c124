// Work sharing: the micro-batches of an update belong to all ranks, and who is free takes the next one
// (docs/protocol.md, rule 17).
#pragma once

#include <tuple>
#include <vector>

#include "core/fields.h"
#include "core/types.h"

namespace horovod_partial {

// Micro-batches of an update by their numbers: of as many for each rank, those of rank 0 come first, then those of
// rank 1. A rank makes its own, in order, and then takes over those that other ranks have not begun.
using MicroBatches = std::vector<int>;

// What a rank says of its part of the update that is open. Levels.
struct Share {
  int granted = 0;     // micro-batches that it may begin
  int begun = 0;       // and has begun
  bool wants = false;  // a thread of it waits to begin another one
  bool gone = false;   // its optimizer is, and begins none

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("granted", self.granted), Named("begun", self.begun), Named("wants", self.wants),
                           Named("gone", self.gone));
  }
  bool operator==(const Share& other) const { return Fields(*this) == Fields(other); }
};

// The rank's half. Not thread-safe: its bucket's lock is held around every call.
class OwnShare {
 public:
  // Each rank makes its own micro-batches of the first update: it has to declare its buckets in it.
  OwnShare(Rank rank, int each);

  bool MayBegin() const { return begun_ < granted_.size(); }
  int next() const { return granted_.at(begun_); }
  void Begin() { ++begun_; }
  // What has been begun last has made no gradient, and will not for now: it is a grant again.
  void Return() { --begun_; }
  // What the coordinator grants in this update, which may be less than before. What has been begun stays.
  void Hear(const MicroBatches& granted);
  // The rank begins no more.
  void Leave() { granted_.resize(begun_); }
  // So many have been made; what else has been begun will not be.
  void GiveUp(int made) {
    begun_ = static_cast<std::size_t>(made);
    Leave();
  }
  // The update is complete. Each rank holds the first of its own of the next one.
  void Advance();
  int begun() const { return static_cast<int>(begun_); }
  Share share(bool wants, bool gone = false) const {
    return {static_cast<int>(granted_.size()), static_cast<int>(begun_), wants, gone};
  }

 private:
  int first_;  // of its own
  MicroBatches granted_;
  std::size_t begun_ = 0;
};

// The coordinator's half, for one optimizer. What is taken back is free when the rank's report shows that it holds
// less, and not before: the rank may have begun meanwhile.
class Ledger {
 public:
  Ledger(int size, int micro_batches);

  // `done`: micro-batches whose gradients are complete.
  void Observe(Rank rank, const Share& share, int done, Time now);
  void Advance(Time now);

  // What each rank is granted, if there is news for one of them. `comes`: ranks that may begin another one.
  std::vector<MicroBatches> Decide(const std::vector<bool>& comes, Time now);
  // A rank is in the middle of one.
  bool IsOpen(Rank rank) const {
    const State& state = ranks_[static_cast<std::size_t>(rank)];
    return state.begun > state.done;
  }
  // When Decide should be called again although no rank has news, or kNever.
  Time NextDeadline() const { return deadline_; }

 private:
  friend class LedgerPeer;  // by which the explorer grants in any order

  struct State {
    MicroBatches granted;  // that may be held there: more is told in the same cycle, and less is believed when reported
    int begun = 0;
    int done = 0;
    bool wants = false;
    bool gone = false;
    Time since{0};  // the last one was begun, or has ended
    Time pace{0};   // one takes so long, lately; 0 if that is not known

    int held() const { return static_cast<int>(granted.size()); }
  };
  // How many each rank should hold, if all that nobody has begun could be granted anew.
  std::vector<int> Wanted(const std::vector<bool>& comes, Time now) const;
  std::vector<MicroBatches> Tell(const std::vector<int>& wanted);
  void Grant(std::size_t rank);
  int Free() const;
  static Time FreeAt(const State& state, Time pace, Time now);

  int each_;
  std::vector<State> ranks_;
  std::vector<bool> taken_;  // micro-batches that are granted to some rank
  Time deadline_ = kNever;
};

}  // namespace horovod_partial
