// Work sharing: the micro-batches of an update (an optimizer step) belong to all ranks, and a free rank takes the next
// one (docs/protocol.md, rule 17).
#pragma once

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// The numbers of some micro-batches of an update. All ranks have equal own shares: rank 0 has the first numbers, rank 1
// the next. A rank computes its own share in order, and then micro-batches that other ranks have not begun.
using MicroBatches = std::vector<int>;

// What a rank reports of its micro-batches in the open update. Each report replaces the one before.
struct Share {
  int granted = 0;     // the number of micro-batches that the rank may begin
  int begun = 0;       // how many of its granted micro-batches the rank has begun
  Time computed{0};    // how long it took to compute those that have gradients now
  Time age{0};         // the time since the micro-batch in progress began, or else since the last one ended
  bool wants = false;  // true if a thread waits to begin another micro-batch
  bool gone = false;   // true if the rank begins no more micro-batches, because its optimizer is gone

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("granted", self.granted), Named("begun", self.begun), Named("computed", self.computed),
                           Named("age", self.age), Named("wants", self.wants), Named("gone", self.gone));
  }
};

// Work sharing on one rank: which micro-batches the rank may begin. Class Ledger is the coordinator's side of it.
// Not thread-safe: the bucket's lock must be held.
class OwnShare {
 public:
  OwnShare(Rank rank, int each);

  bool MayBegin() const { return begun_ < granted_.size(); }
  int next() const { return granted_.at(begun_); }
  // A micro-batch may begin before the one before has ended: a device has a queue. Its time counts from that end.
  void Begin(Time now) {
    if (begun_ <= ended_) since_ = now;
    ++begun_;
  }
  // Called when the oldest micro-batch that has not ended has made its gradients.
  void End(Time now) {
    ++ended_;
    computed_ += now - since_;
    since_ = now;
  }
  // Gives back the micro-batch that was begun last and has made no gradient. This micro-batch may be begun again.
  void Return() { --begun_; }
  // Takes the coordinator's decision for this update. The rank may get fewer micro-batches than before, but not
  // fewer than it has begun. Returns true if it gets fewer.
  bool Hear(const MicroBatches& granted);
  // Called when the rank will begin no more micro-batches.
  void Leave() { granted_.resize(begun_); }
  // Called when only `made` micro-batches have gradients or will get some from a device, and the others that were
  // begun will get none.
  void GiveUp(int made) {
    begun_ = static_cast<std::size_t>(made);
    Leave();
  }
  // Called when the update is complete. In the next update the rank may begin all micro-batches of its own share.
  void Advance();
  int begun() const { return static_cast<int>(begun_); }
  Share share(Time now, bool wants = false, bool gone = false) const {
    const Time age = std::clamp(now - since_, Time(0), kLongest);
    return {static_cast<int>(granted_.size()), static_cast<int>(begun_), computed_, age, wants, gone};
  }

 private:
  int first_;  // the number of the first micro-batch of this rank's own share; another rank may compute it instead
  int each_;   // how many micro-batches its own share has
  MicroBatches granted_;
  std::size_t begun_ = 0;
  std::size_t ended_ = 0;
  Time since_{0};     // when the micro-batch in progress began, or else when the last one ended
  Time computed_{0};  // how long the ended micro-batches of this update took
};

// The coordinator's half of work sharing for one optimizer: which rank may begin which micro-batch. A micro-batch taken
// back from a rank is free only when the rank reports that it holds fewer, because the rank may have begun it before.
class Ledger {
 public:
  Ledger(int size, int micro_batches);

  // Takes what a rank reports. `done` is its number of micro-batches whose gradients are complete.
  void Observe(Rank rank, const Share& share, int done, Time now);
  void Advance();

  // Returns the micro-batches that each rank may begin. The result is empty if nothing has changed. `comes`: true for
  // each rank that may still begin micro-batches.
  std::vector<MicroBatches> Decide(const std::vector<bool>& comes, Time now);
  // Returns true if a rank is in the middle of a micro-batch.
  bool IsOpen(Rank rank) const {
    const State& state = ranks_[Index(rank)];
    return state.begun > state.done;
  }
  // Returns when Decide must be called again although no rank has news, or kNever.
  Time NextDeadline() const { return deadline_; }

 private:
  friend class LedgerPeer;  // lets a test give out micro-batches in any order

  struct State {
    MicroBatches granted;  // the micro-batches that the rank may hold, until a report says it holds fewer
    int begun = 0;
    int done = 0;
    bool wants = false;
    bool gone = false;
    bool was_away = false;  // true if the rank was away, as in a flush, since this update began
    Time computed{0};
    Time since{0};        // when the micro-batch in progress began, or else when the last one ended
    Time asked = kNever;  // since when the rank has been due to get a micro-batch that another rank holds
    Time pace{0};         // how long a micro-batch has taken lately; 0 if not known

    int held() const { return static_cast<int>(granted.size()); }
    int unbegun() const { return held() - begun; }  // how many it holds and has not begun
    bool idle() const { return done == held(); }    // the rank has made all that it holds
  };
  // When the ranks would end what they should hold.
  struct Plan {
    std::vector<int> wanted;  // how many micro-batches each rank should hold
    std::vector<int> keeps;   // how many of them do not move to another rank
    std::vector<Time> pace;
    std::vector<Time> end;  // kNever if the rank begins none
  };
  Plan PlanAt(const std::vector<bool>& comes, Time now) const;
  std::vector<MicroBatches> Tell(const std::vector<int>& wanted, Time now);
  // Returns when moving a micro-batch to an idle rank would pay next, if no rank ends one until then. If one has moved
  // in the update before, returns at the latest when a rank should begin the last one that it holds.
  Time NextMove(const Plan& plan, Time now) const;
  void Grant(std::size_t rank);
  void Mark(int micro_batch, bool taken);
  Time Since(const State& state, Time now) const;
  Time Due(const State& state, Time pace, Time now) const;
  Time FreeAt(const State& state, Time pace, Time now) const;

  int each_;
  std::vector<State> ranks_;
  std::vector<bool> taken_;   // true for each micro-batch that some rank holds
  std::vector<int> left_;     // of each rank's own share: how many micro-batches no rank holds
  int free_ = 0;              // the sum of `left_`
  bool moves_ = false;        // true if a micro-batch has moved in this update
  bool looks_ahead_ = false;  // true if one has moved in the update before
  Time started_ = kNever;     // when the first micro-batch of this update was begun
  Time deadline_ = kNever;
  Time latency_{0};  // how long it has taken lately to move a micro-batch to another rank; 0 if not known
};

}  // namespace horovod_partial
