// Work sharing: the micro-batches of an update belong to all ranks, and a free rank takes the next one
// (docs/protocol.md, rule 17).
#pragma once

#include <tuple>
#include <vector>

#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// Numbers of micro-batches in an update. Each rank has equally many of its own: first come those of rank 0, then those
// of rank 1. A rank makes its own in order, and then takes over some that other ranks have not begun.
using MicroBatches = std::vector<int>;

// What a rank reports of its part in the open update. These are levels.
struct Share {
  int granted = 0;     // micro-batches that it may begin
  int begun = 0;       // how many of them it has begun
  bool wants = false;  // a thread waits to begin another one
  bool gone = false;   // its optimizer is gone, so it begins none

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("granted", self.granted), Named("begun", self.begun), Named("wants", self.wants),
                           Named("gone", self.gone));
  }
  bool operator==(const Share& other) const { return Fields(*this) == Fields(other); }
};

// The rank's half. Not thread-safe: call it under the bucket's lock.
class OwnShare {
 public:
  // In the first update each rank makes all its own micro-batches, because it has to declare its buckets in it.
  OwnShare(Rank rank, int each);

  bool MayBegin() const { return begun_ < granted_.size(); }
  int next() const { return granted_.at(begun_); }
  void Begin() { ++begun_; }
  // The micro-batch that was begun last has made no gradient, and will not for now. It is a grant again.
  void Return() { --begun_; }
  // Takes the coordinator's grants in this update. They may be fewer than before, but what has been begun stays.
  void Hear(const MicroBatches& granted);
  // The rank will begin no more micro-batches.
  void Leave() { granted_.resize(begun_); }
  // `made` micro-batches have gradients. The others that were begun will get none.
  void GiveUp(int made) {
    begun_ = static_cast<std::size_t>(made);
    Leave();
  }
  // The update is complete. In the next one each rank holds the first of its own micro-batches.
  void Advance();
  int begun() const { return static_cast<int>(begun_); }
  Share share(bool wants, bool gone = false) const {
    return {static_cast<int>(granted_.size()), static_cast<int>(begun_), wants, gone};
  }

 private:
  int first_;  // its first own micro-batch
  MicroBatches granted_;
  std::size_t begun_ = 0;
};

// The coordinator's half, for one optimizer. A grant that is taken back is free only when the rank's report shows that
// it holds fewer, because the rank may have begun it meanwhile.
class Ledger {
 public:
  Ledger(int size, int micro_batches);

  // `done`: micro-batches whose gradients are complete.
  void Observe(Rank rank, const Share& share, int done, Time now);
  void Advance(Time now);

  // Returns the grants of each rank; empty if nothing has changed. `comes`: ranks that may begin another one.
  std::vector<MicroBatches> Decide(const std::vector<bool>& comes, Time now);
  // True if a rank is in the middle of a micro-batch.
  bool IsOpen(Rank rank) const {
    const State& state = ranks_[static_cast<std::size_t>(rank)];
    return state.begun > state.done;
  }
  // When Decide should be called again although no rank has news, or kNever.
  Time NextDeadline() const { return deadline_; }

 private:
  friend class LedgerPeer;  // lets the test's explorer grant in any order

  struct State {
    MicroBatches granted;  // those that the rank may hold: more when they are granted, fewer only when it reports so
    int begun = 0;
    int done = 0;
    bool wants = false;
    bool gone = false;
    Time since{0};  // when the last one was begun or ended
    Time pace{0};   // how long one takes lately; 0: not known

    int held() const { return static_cast<int>(granted.size()); }
  };
  // Returns how many each rank should hold if all that are not begun could be granted again.
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
