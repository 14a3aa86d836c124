// Work sharing (docs/protocol.md, rule 17), explored exhaustively: the real Coordinator, Ledger and OwnShare, with
// every order in which applications and cycles may come, and with grants and takings-back in any legal order.
//
// A cycle is what Horovod's negotiation and the hooks make of it: every rank's report is built, the coordinator
// decides, the rounds begin on every rank and are told of grants, and the rounds end on every rank. Between any two of
// these a rank's application may take any number of steps; that of a rank moves only when it is that rank's turn, which
// loses nothing, since steps of different ranks commute.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/rounds/coordinator.h"
#include "core/rounds/message.h"
#include "core/rounds/work_sharing.h"
#include "core/values/bytes.h"
#include "harness/explorer.h"

namespace horovod_partial {

class LedgerPeer {
 public:
  // Takes back what has been granted since the ranks have reported this.
  static void Undo(Ledger& ledger, const std::vector<int>& reported) {
    for (std::size_t i = 0; i < reported.size(); ++i) {
      MicroBatches& granted = ledger.ranks_[i].granted;
      for (; static_cast<int>(granted.size()) > reported[i]; granted.pop_back()) ledger.Mark(granted.back(), false);
    }
  }
  // What is told in place of what the ledger would tell, by the number of micro-batches for each rank.
  static std::vector<MicroBatches> Tell(Ledger& ledger, const std::vector<int>& numbers) {
    std::vector<MicroBatches> told;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      while (numbers[i] > ledger.ranks_[i].held()) ledger.Grant(i);
      told.push_back(ledger.ranks_[i].granted);
      told.back().resize(static_cast<std::size_t>(numbers[i]));
    }
    return told;
  }
  static int Free(const Ledger& ledger) { return ledger.free_; }
  static bool WasAway(const Ledger& ledger, std::size_t rank) { return ledger.ranks_[rank].was_away; }
  static bool IsKnownToBeSlow(const Ledger& ledger, std::size_t rank) { return ledger.ranks_[rank].pace > Time(1); }
  static const MicroBatches& Granted(const Ledger& ledger, std::size_t rank) { return ledger.ranks_[rank].granted; }
  static int Begun(const Ledger& ledger, std::size_t rank) { return ledger.ranks_[rank].begun; }
  static bool IsIdle(const Ledger& ledger, std::size_t rank) { return ledger.ranks_[rank].idle(); }
};

class CoordinatorPeer {
 public:
  static Ledger* LedgerOf(Coordinator& coordinator, const std::string& bucket) {
    const auto found = coordinator.buckets_.find(bucket);
    return found == coordinator.buckets_.end() || !found->second.ledger ? nullptr : &*found->second.ledger;
  }
};

namespace {

using test::Exploration;
using test::Explore;
using test::Require;
using test::Violation;

struct Job {
  std::vector<int> data;  // micro-batches that each rank can make
  int each = 1;           // micro-batches of an update for each rank
  int buckets = 1;
  bool late_ends = false;
  bool joins = false;   // ranks end by a join, and leave when all have joined
  int more = 0;         // micro-batches that each rank can make after a flush, in which ranks compare their replicas
  int pace = 0;         // how long a micro-batch takes on the last rank, if it takes 1 on the others; or nobody knows
  bool queues = false;  // each rank has a device, on which a micro-batch may wait behind the one in progress
};

struct Coverage {
  std::size_t taken_back = 0;
  std::size_t several = 0;    // takings-back of more than one at once
  std::size_t kept = 0;       // a taking-back that came too late
  std::size_t unequal = 0;    // updates in which ranks had unequally many
  std::size_t none = 0;       // and in which a rank had none
  std::size_t shortened = 0;  // with fewer than there should be
  std::size_t late_ends = 0;
};

constexpr const char* kNames[] = {"a", "b"};

class World {
 public:
  World(const Job& job, Coverage& coverage)
      : job_(&job), coverage_(&coverage), coordinator_(static_cast<int>(job.data.size())) {
    for (const int data : job.data) {
      RankState rank(static_cast<Rank>(ranks_.size()), job.each);
      rank.left = data;
      rank.more = job.more;
      rank.buckets.resize(static_cast<std::size_t>(job.buckets));
      ranks_.push_back(rank);
    }
    joined_.resize(ranks_.size());
    total_ = job.each * static_cast<int>(ranks_.size());
  }

  bool Done() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const RankState& rank) { return rank.over; });
  }
  bool AtStartOfCycle() const { return phase_ == Phase::kReport && turn_ == 0; }

  // Moves by number: 0 is the next step of the cycle, then its other outcomes, then those of the application.
  std::vector<int> Moves() const {
    std::vector<int> moves{0};
    if (phase_ == Phase::kDecide)
      for (std::size_t i = 0; i < Choices().size(); ++i) moves.push_back(kChoice + static_cast<int>(i));
    if (phase_ == Phase::kFinish && job_->late_ends && AnyRunning(ranks_[turn_])) moves.push_back(kPostpone);
    if (phase_ == Phase::kDecide) return moves;
    for (const int step : Steps(ranks_[turn_])) moves.push_back(kStep + step);
    return moves;
  }

  void Apply(int move) {
    if (move >= kStep) return Step(ranks_[turn_], move - kStep);
    switch (phase_) {
      case Phase::kReport: return ReportNext();
      case Phase::kDecide: return Decide(move);
      case Phase::kBegin: return BeginNext();
      case Phase::kFinish: return FinishNext(move == kPostpone);
    }
  }

  std::string Describe(int move) const {
    static const char* const phases[] = {"reports", "decides", "begins", "finishes"};
    const std::string text = "rank " + std::to_string(turn_) + " ";
    if (move >= kStep) return text + "steps (" + std::to_string(move - kStep) + ")";
    return text + phases[static_cast<int>(phase_)] + " (" + std::to_string(move) + ")";
  }

  // No application can move.
  bool Stuck() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const RankState& rank) { return Steps(rank).empty(); });
  }

  std::string Key() const {
    std::string key;
    const auto put = [&key](int value) { key += static_cast<char>(value); };
    put(static_cast<int>(phase_));
    put(static_cast<int>(turn_));
    int base = 1 << 20;
    for (const RankState& rank : ranks_) base = std::min(base, rank.taken);
    for (const RankState& rank : ranks_) {
      const Share share = rank.share.share(Time(0));
      put(static_cast<int>(rank.at));
      put(rank.done);
      put(rank.left);
      put(rank.taken - base);
      put(rank.update - base);
      put(share.granted);
      put(share.begun);
      OwnShare copy = rank.share;
      for (; copy.MayBegin(); copy.Begin(Time(0))) put(copy.next());
      for (const int each : rank.own) put(each);
      put(rank.flushes | rank.over << 1 | rank.wants_join << 2 | (rank.taken == 0) << 3 | rank.news << 4 |
          rank.holds_more << 5 | rank.closed << 6);
      put(rank.more | rank.returns << 4 | rank.met << 5);
      for (const OwnBucket& bucket : rank.buckets) {
        put(bucket.count | bucket.queued << 4);
        put(bucket.reported | bucket.running << 1 | bucket.declared << 2);
        put(bucket.completed - base);
      }
    }
    for (const bool joined : joined_) put(joined);
    put(flushed_);
    for (std::size_t r = 0; r < ranks_.size() && OwnLedger() != nullptr; ++r)
      put(LedgerPeer::WasAway(*OwnLedger(), r) | LedgerPeer::IsKnownToBeSlow(*OwnLedger(), r) << 1);
    if (phase_ != Phase::kReport || turn_ > 0)
      for (std::size_t i = 0; i < ranks_.size(); ++i) key += reports_[i];
    for (const Closing& closing : closings_) key += closing.bucket + NameOf(closing.reason);
    for (const Grants& grants : grants_)
      for (const MicroBatches& granted : grants.by_rank) {
        put(-1);
        for (const int each : granted) put(each);
      }
    return key;
  }

  // A rank that comes is idle, and some rank holds what it has not begun, or something is free.
  bool MayMove() const {
    const Ledger* ledger = OwnLedger();
    if (ledger == nullptr) return false;
    bool any_idle = false;
    bool any_left = LedgerPeer::Free(*ledger) > 0;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      any_idle = any_idle || (LedgerPeer::IsIdle(*ledger, r) && ranks_[r].at != At::kLeaving);
      any_left = any_left || static_cast<int>(LedgerPeer::Granted(*ledger, r).size()) > LedgerPeer::Begun(*ledger, r);
    }
    return any_idle && any_left;
  }

  // Some rank, or the coordinator, asks for the next cycle. A round that runs ends without one being asked for. The
  // coordinator asks while something may move: of the ledger's own decisions Decide requires this.
  bool Asks() const {
    return coordinator_.NextDeadline() != kNever || MayMove() ||
           std::any_of(ranks_.begin(), ranks_.end(),
                       [](const RankState& rank) { return rank.news || AnyRunning(rank); });
  }

  // Cycles in which nothing is postponed, and the ledger decides: some application can move after a few of them.
  void CheckProgress() const {
    World world = *this;
    for (int cycle = 0; cycle < 8; ++cycle) {
      if (world.Stuck() && !world.Asks()) throw Violation("nobody asks for the cycle that all wait for");
      do world.Apply(0);
      while (!world.AtStartOfCycle());
      if (world.Done() || !world.Stuck()) return;
    }
    throw Violation("nothing can happen any more");
  }

  void CheckEnd() const {
    for (const RankState& rank : ranks_) {
      for (const OwnBucket& bucket : rank.buckets)
        Require(bucket.count + bucket.queued == 0, "a contribution is left at the end");
      Require(rank.made == rank.delivered, "a micro-batch is lost");
    }
  }

 private:
  static constexpr int kChoice = 1;
  static constexpr int kPostpone = 1000;
  static constexpr int kStep = 2000;
  enum StepKind : int { kBegin, kWait, kGradient, kTake, kLeave, kReturn, kTrainOn, kReady };  // the last of a bucket
  enum class Phase : std::uint8_t { kReport, kDecide, kBegin, kFinish };
  // After a flush a rank comes back, begins a micro-batch, and computes it when all ranks have compared their replicas.
  enum class At : std::uint8_t { kBetween, kWaiting, kComputing, kLeaving, kBack, kComparing };

  struct OwnBucket {
    int count = 0;          // micro-batches in the arrival
    int queued = 0;         // and those that the device still computes
    bool reported = false;  // so many
    bool running = false;
    bool declared = false;
    int completed = 0;
    int input = 0;  // of the round that runs
  };
  struct RankState {
    RankState(Rank rank, int each) : share(rank, each) {}
    OwnShare share;
    At at = At::kBetween;
    int done = 0;          // buckets whose gradients the micro-batch has made
    int left = 0;          // data
    int taken = 0;         // updates
    int update = 0;        // that the share is of
    int weights = 0;       // updates in those with which the micro-batch was begun
    std::vector<int> own;  // micro-batches of this update that have been begun here
    int made = 0;          // micro-batches, in all buckets
    int delivered = 0;
    int more = 0;  // data after the flush
    bool flushes = false;
    bool closed = false;   // the flush, though a round of it may run
    bool returns = false;  // from the flush
    bool met = false;      // this rank has come to compare its replica
    bool over = false;
    bool wants_join = false;
    bool holds_more = false;  // at the last begin, and since then nobody has asked for reports
    bool news = false;        // the rank asks for a cycle
    std::vector<OwnBucket> buckets;
  };

  static bool AnyRunning(const RankState& rank) {
    return std::any_of(rank.buckets.begin(), rank.buckets.end(), [](const OwnBucket& each) { return each.running; });
  }
  static bool HasQueued(const RankState& rank) {
    return std::any_of(rank.buckets.begin(), rank.buckets.end(), [](const OwnBucket& each) { return each.queued > 0; });
  }
  static bool HasArrived(const RankState& rank) {
    return HasQueued(rank) ||
           std::any_of(rank.buckets.begin(), rank.buckets.end(), [](const OwnBucket& each) { return each.count > 0; });
  }
  static bool MayBegin(const RankState& rank) {
    return rank.share.MayBegin() && IsCurrent(rank) && rank.buckets.back().queued <= 1;
  }
  static bool HasUpdate(const RankState& rank) {
    return std::all_of(rank.buckets.begin(), rank.buckets.end(),
                       [&](const OwnBucket& each) { return each.completed > rank.taken && !each.running; });
  }
  // The share is of the update whose weights this rank has.
  static bool IsCurrent(const RankState& rank) { return rank.update == rank.taken; }

  std::vector<int> Steps(const RankState& rank) const {
    std::vector<int> steps;
    if (rank.over) return steps;
    const bool joined = joined_[static_cast<std::size_t>(&rank - ranks_.data())];
    if (joined) return steps;
    if (rank.at != At::kComputing && HasUpdate(rank)) return {kTake};
    for (std::size_t b = 0; b < rank.buckets.size(); ++b)
      if (rank.buckets[b].queued > 0) steps.push_back(kReady + static_cast<int>(b));
    switch (rank.at) {
      case At::kBetween:
        if (rank.left > 0) steps.push_back(MayBegin(rank) ? kBegin : kWait);
        if (rank.left == 0) steps.push_back(kLeave);
        break;
      case At::kWaiting:
        if (MayBegin(rank)) steps.push_back(kBegin);
        break;
      case At::kComputing: steps.push_back(kGradient); break;
      case At::kLeaving:
        if (rank.returns) steps.push_back(kReturn);
        if (!rank.flushes && !HasArrived(rank) && !AnyRunning(rank) && !rank.wants_join) steps.push_back(kLeave);
        break;
      case At::kBack:
        if (MayBegin(rank)) steps.push_back(kBegin);
        break;
      case At::kComparing:
        if (std::all_of(ranks_.begin(), ranks_.end(), [](const RankState& each) { return each.met; }))
          steps.push_back(kTrainOn);
        break;
    }
    return steps;
  }

  void Step(RankState& rank, int step) {
    if (step >= kReady) return Arrive(rank, rank.buckets[static_cast<std::size_t>(step - kReady)]);
    switch (step) {
      case kBegin:
        rank.own.push_back(rank.share.next());
        rank.share.Begin(Time(0));
        rank.holds_more = rank.share.MayBegin();
        for (const RankState& other : ranks_)
          Require(&other == &rank || other.update != rank.update ||
                      std::find(other.own.begin(), other.own.end(), rank.own.back()) == other.own.end(),
                  "two ranks make one micro-batch");
        rank.met = rank.met || rank.at == At::kBack;
        rank.at = rank.at == At::kBack ? At::kComparing : At::kComputing;
        rank.done = 0;
        rank.weights = rank.taken;
        --rank.left;
        break;
      case kWait: rank.at = At::kWaiting; break;
      case kGradient: {
        OwnBucket& bucket = rank.buckets[static_cast<std::size_t>(rank.done)];
        Require(!bucket.running, "what is being sent is written");
        Require(bucket.completed == rank.weights, "a gradient of old weights is in an update");
        for (std::size_t i = 0; i < closings_.size(); ++i)
          Require(closings_[i].bucket != kNames[rank.done] || phase_ == Phase::kFinish || begun_ > RankOf(rank),
                  "what has been closed is written");
        ++bucket.queued;
        if (!job_->queues) Arrive(rank, bucket);
        if (++rank.done == job_->buckets) rank.at = At::kBetween;
        break;
      }
      case kTake:
        ++rank.taken;
        if (rank.at == At::kWaiting) rank.at = At::kBetween;
        break;
      case kLeave:
        rank.news = true;
        rank.holds_more = false;
        if (rank.at == At::kBetween) {
          rank.at = At::kLeaving;
        } else if (job_->joins && !rank.wants_join) {
          rank.wants_join = true;
        } else {
          rank.flushes = true;
        }
        break;
      case kReturn:
        rank.at = At::kBack;
        rank.left = std::exchange(rank.more, 0);
        rank.flushes = rank.closed = rank.returns = false;
        rank.news = true;
        break;
      case kTrainOn: rank.at = At::kComputing; break;
    }
  }
  // The oldest micro-batch that the device still computes has made its gradient in a bucket.
  static void Arrive(RankState& rank, OwnBucket& bucket) {
    Require(!bucket.running, "what is being sent is written");
    --bucket.queued;
    ++bucket.count;
    bucket.reported = false;
    ++rank.made;
    if (!rank.holds_more) rank.news = true;
  }
  std::size_t RankOf(const RankState& rank) const { return static_cast<std::size_t>(&rank - ranks_.data()); }

  Declaration Declared() const {
    Declaration declaration;
    declaration.policy.rule = Policy::Rule::kWorkSharing;
    declaration.policy.micro_batches = total_;
    declaration.policy.max_staleness = 1000;
    return declaration;
  }

  void ReportNext() {
    RankState& rank = ranks_[turn_];
    Report report;
    rank.news = false;
    if (rank.wants_join) joined_[turn_] = true;
    const bool joined = joined_[turn_];
    report.leaves = rank.at == At::kLeaving && !HasQueued(rank);
    if (rank.flushes && rank.more == 0 && !rank.over) report.flush = Report::Flush::kEnding;
    if (rank.flushes && rank.more > 0 && !rank.closed) report.flush = Report::Flush::kFlushing;
    report.absent.all = report.flush != Report::Flush::kNone;
    for (int b = 0; b < job_->buckets; ++b) {
      OwnBucket& bucket = rank.buckets[static_cast<std::size_t>(b)];
      Report::Item item;
      item.bucket = kNames[b];
      if (b == job_->buckets - 1) {
        item.share = rank.share.share(Time(0), rank.at == At::kWaiting || rank.at == At::kBack);
        if (job_->pace > 0) item.share->computed = Time(bucket.count * (turn_ + 1 < ranks_.size() ? 1 : job_->pace));
      }
      if (bucket.running) {
        item.kind = Report::Item::Kind::kRunning;
      } else if (bucket.count > 0 && !bucket.reported && !joined) {
        item.kind = Report::Item::Kind::kArrival;
        item.gradients = bucket.count;
        if (!bucket.declared) {
          item.declaration = Declared();
          item.declaration->policy.grants = b == job_->buckets - 1;
        }
        bucket.reported = true;
      } else {
        item.kind = Report::Item::Kind::kPending;
        if (!item.share) continue;
      }
      report.items.push_back(item);
    }
    reports_.resize(ranks_.size());
    reports_[turn_] = BytesOf(report);
    coordinator_.Observe(static_cast<Rank>(turn_), report, Time(0));
    if (++turn_ < ranks_.size()) return;
    turn_ = 0;
    phase_ = Phase::kDecide;
    coordinator_.SetJoined(joined_);
    closings_ = coordinator_.Decide(Time(0));
    CheckClosings();
  }

  void CheckClosings() const {
    for (const Closing& closing : closings_) {
      Require(closing.error.empty(), ("a round is refused: " + closing.error).c_str());
      const auto b = static_cast<std::size_t>(closing.bucket == kNames[0] ? 0 : 1);
      int most = 0;
      int least = total_;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        const RankState& rank = ranks_[r];
        const auto& contribution = closing.contributions[r];
        const bool open = (rank.at == At::kComputing || rank.at == At::kComparing) && rank.weights == closing.round &&
                          rank.done <= static_cast<int>(b);
        Require(!open && rank.buckets[b].queued == 0, "a bucket closes before a micro-batch that has begun is in it");
        if (joined_[r]) continue;
        Require(contribution.gradients == (rank.buckets[b].reported ? rank.buckets[b].count : 0),
                "a closing has another number of micro-batches than a rank has made");
        most = std::max(most, contribution.gradients);
        least = std::min(least, contribution.gradients);
      }
      Require(closing.gradients() <= total_, "an update has too many micro-batches");
      if (closing.gradients() < total_) {
        for (std::size_t r = 0; r < ranks_.size(); ++r)
          Require(joined_[r] || ranks_[r].at == At::kLeaving, "an update has too few micro-batches");
        ++coverage_->shortened;
      }
      coverage_->unequal += most > least ? 1 : 0;
      coverage_->none += least == 0 && most > 0 ? 1 : 0;
    }
  }

  // Some rank reports again, because it is told that it holds less.
  bool AnyHoldsLess() const {
    for (const Grants& grants : grants_)
      for (std::size_t r = 0; r < ranks_.size(); ++r)
        if (static_cast<int>(grants.by_rank[r].size()) < ReportedNumbers()[r]) return true;
    return false;
  }

  Ledger* OwnLedger() const {
    return CoordinatorPeer::LedgerOf(const_cast<Coordinator&>(coordinator_), kNames[job_->buckets - 1]);
  }

  // What every rank holds, before anything is told in this cycle.
  std::vector<int> ReportedNumbers() const {
    const auto is_of_ledger = [&](const Closing& closing) { return closing.bucket == kNames[job_->buckets - 1]; };
    if (std::any_of(closings_.begin(), closings_.end(), is_of_ledger))
      return std::vector<int>(ranks_.size(), job_->each);
    std::vector<int> numbers;
    for (const std::string& report : reports_)
      numbers.push_back(FromBytes<Report>(report, "a report").items.back().share->granted);
    return numbers;
  }

  // All that might be told: each rank's number is kept, raised while there is something to grant, or lowered, at most
  // to what the rank has begun.
  std::vector<std::vector<int>> Choices() const {
    std::vector<std::vector<int>> choices;
    if (OwnLedger() == nullptr) return choices;
    Ledger ledger = *OwnLedger();
    LedgerPeer::Undo(ledger, ReportedNumbers());
    std::vector<int> numbers(ranks_.size());
    Choose(ledger, 0, LedgerPeer::Free(ledger), numbers, choices);
    return choices;
  }
  void Choose(const Ledger& ledger, std::size_t r, int free, std::vector<int>& numbers,
              std::vector<std::vector<int>>& choices) const {
    if (r == ranks_.size()) {
      choices.push_back(numbers);
      return;
    }
    const int held = static_cast<int>(LedgerPeer::Granted(ledger, r).size());
    const int begun = LedgerPeer::Begun(ledger, r);
    numbers[r] = held;
    Choose(ledger, r + 1, free, numbers, choices);
    for (numbers[r] = begun; numbers[r] < held; ++numbers[r]) Choose(ledger, r + 1, free, numbers, choices);
    for (int more = 1; more <= free; ++more) {
      numbers[r] = held + more;
      Choose(ledger, r + 1, free - more, numbers, choices);
    }
  }

  void Decide(int move) {
    grants_ = coordinator_.grants();
    Require(!MayMove() || coordinator_.NextDeadline() != kNever || AnyHoldsLess(),
            "nobody looks again at what may move");
    if (move >= kChoice) {
      const std::vector<int> numbers = Choices().at(static_cast<std::size_t>(move - kChoice));
      LedgerPeer::Undo(*OwnLedger(), ReportedNumbers());
      grants_ = {{kNames[job_->buckets - 1], LedgerPeer::Tell(*OwnLedger(), numbers)}};
    }
    phase_ = Phase::kBegin;
    begun_ = 0;
  }

  void BeginNext() {
    RankState& rank = ranks_[turn_];
    for (const Closing& closing : closings_) {
      const auto b = static_cast<std::size_t>(closing.bucket == kNames[0] ? 0 : 1);
      OwnBucket& bucket = rank.buckets[b];
      bucket.declared = true;
      if (b + 1 == rank.buckets.size()) {
        rank.share.Advance();
        ++rank.update;
        rank.own.clear();
      }
      if (closing.flushes) flushed_ = closing.flush_over == Report::Flush::kNone ? flushed_ | 1 << b : 0;
      if (joined_[turn_]) {
        rank.taken = std::max(rank.taken, bucket.completed + 1);
        ++bucket.completed;
        continue;
      }
      bucket.running = true;
      bucket.input = bucket.count;
      rank.delivered += bucket.count;
      Require(closing.contributions[turn_].gradients == bucket.count, "a rank sends other than it has reported");
      bucket.count = 0;
      bucket.reported = false;
      if (closing.flush_over != Report::Flush::kNone) rank.closed = rank.flushes;
    }
    for (const Grants& grants : grants_) Hear(rank, grants.by_rank[turn_]);
    begun_ = turn_ + 1;
    if (++turn_ < ranks_.size()) return;
    turn_ = 0;
    phase_ = Phase::kFinish;
  }
  void Hear(RankState& rank, const MicroBatches& granted) {
    const Share before = rank.share.share(Time(0));
    if (rank.share.Hear(granted)) {
      rank.holds_more = false;
      rank.news = true;
    }
    coverage_->taken_back += static_cast<int>(granted.size()) < before.granted ? 1 : 0;
    coverage_->several += static_cast<int>(granted.size()) + 1 < before.granted ? 1 : 0;
    coverage_->kept += static_cast<int>(granted.size()) < before.begun ? 1 : 0;
  }

  void FinishNext(bool postpones) {
    RankState& rank = ranks_[turn_];
    coverage_->late_ends += postpones ? 1 : 0;
    for (OwnBucket& bucket : rank.buckets) {
      if (!bucket.running || postpones) continue;
      bucket.running = false;
      ++bucket.completed;
    }
    if (rank.closed && !AnyRunning(rank)) (rank.more > 0 ? rank.returns : rank.over) = true;
    if (++turn_ < ranks_.size()) return;
    turn_ = 0;
    phase_ = Phase::kReport;
    closings_.clear();
    grants_.clear();
    if (std::find(joined_.begin(), joined_.end(), false) == joined_.end()) {
      joined_.assign(joined_.size(), false);
      for (RankState& each : ranks_) each.wants_join = false, each.flushes = each.news = true;
    }
  }

  const Job* job_;
  Coverage* coverage_;
  Coordinator coordinator_;
  int total_ = 0;
  std::vector<RankState> ranks_;
  std::vector<bool> joined_;
  Phase phase_ = Phase::kReport;
  std::size_t turn_ = 0;
  std::size_t begun_ = 0;
  int flushed_ = 0;
  std::vector<std::string> reports_;
  std::vector<Closing> closings_;
  std::vector<Grants> grants_;
};

struct Case {
  const char* name;
  Job job;
};
void PrintTo(const Case& each, std::ostream* out) { *out << each.name; }

class Sharing : public testing::TestWithParam<Case> {};

TEST_P(Sharing, IsSafe) {
  Coverage coverage;
  const Exploration result = Explore(World(GetParam().job, coverage));
  EXPECT_EQ(result.violation, "") << result.trace;
  EXPECT_GT(result.ends, 0u);
  std::printf("%zu states, %zu taken back, %zu of several, %zu kept, %zu unequal, %zu without one, %zu short\n",
              result.states, coverage.taken_back, coverage.several, coverage.kept, coverage.unequal, coverage.none,
              coverage.shortened);
}

INSTANTIATE_TEST_SUITE_P(
    All, Sharing,
    testing::Values(Case{"Two", {{3, 3}, 1}}, Case{"TwoUnequal", {{4, 2}, 2}}, Case{"TwoLong", {{5, 5}, 1}},
                    Case{"TwoBuckets", {{3, 2}, 1, 2}}, Case{"TwoBucketsOfTwo", {{5, 4}, 2, 2}},
                    Case{"Late", {{3, 3}, 1, 1, true}}, Case{"LateBuckets", {{3, 3}, 1, 2, true}},
                    Case{"Joins", {{3, 2}, 1, 1, false, true}}, Case{"JoinsLate", {{4, 3}, 2, 2, true, true}},
                    Case{"ThreeUnequal", {{3, 2, 1}, 1}}, Case{"Flushes", {{2, 1}, 1, 1, false, false, 2}},
                    Case{"FlushesSlow", {{4, 4}, 2, 1, false, false, 2, 10}},
                    Case{"FlushesBuckets", {{2, 2}, 1, 2, false, false, 1, 10}},
                    Case{"FlushesLate", {{2, 2}, 1, 1, true, false, 1, 10}},
                    Case{"Queues", {{5, 4}, 2, 1, false, false, 0, 0, true}},
                    Case{"QueuesBuckets", {{3, 3}, 2, 2, false, false, 0, 0, true}},
                    Case{"QueuesJoins", {{4, 3}, 2, 1, true, true, 0, 0, true}},
                    Case{"QueuesFlushes", {{3, 3}, 2, 1, false, false, 1, 10, true}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace horovod_partial
