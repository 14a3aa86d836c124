// A simulated job for the explorer: the real Coordinator and the real Buckets, driven step by step in one thread, with
// every choice that time makes in a real job (which thread comes first, how long a wait has lasted) left to the caller.
// Where a rank can come is what the real Bringers say (harness/attendance.h).
//
// A cycle is what Horovod's negotiation and the hooks make of it: every rank's report is built, the coordinator
// decides, the rounds begin on every rank, are reduced, and end on every rank. Between any two of these the ranks'
// applications may take any number of steps.
//
// The background steps of a cycle are taken rank by rank, and the application of a rank moves only when it is that
// rank's turn. This loses nothing: steps of different ranks touch different objects, so they commute, and meet only
// where the coordinator decides and where all have begun.
//
// The world knows what should happen (a model in sums and counts, independent of the code under test), and throws
// Violation where the real objects differ from it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/bucket.h"
#include "core/coordinator.h"
#include "core/message.h"
#include "core/policy.h"
#include "harness/attendance.h"
#include "harness/program.h"

namespace horovod_partial {

class CoordinatorPeer {
 public:
  static void SetQuorum(Coordinator& coordinator, const std::string& bucket, int quorum) {
    const auto found = coordinator.buckets_.find(bucket);
    if (found != coordinator.buckets_.end()) found->second.quorum = quorum;
  }
};

}  // namespace horovod_partial

namespace horovod_partial::test {

inline constexpr Round kForEver = 1 << 20;

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void Require(bool condition, const char* what) {
  if (!condition) throw Violation(what);
}

// Bugs to plant: an explorer that does not find them proves nothing.
enum class Bug {
  kNone,
  kWaitingIsNotReported,   // a rank does not say that it is blocked in a wait of ours: rule 7 without its last part
  kWaitingIsOneFlag,       // a rank in which one thread waits says that it waits everywhere
  kFlushIsOneFlag,         // and one in which a thread flushes, that it is away from everything
  kSilenceIsNotNoticed,    // the fallback of rule 7 is missing
  kParkedIsNotReported,    // nor in a collective that is not ours
  kForeignDoesNotDrain,    // who waits in one is not said to take rounds
  kJoinedIsNotTold,        // the coordinator does not know who has joined
  kPendingIsForgotten,     // a late entry sends zeros instead of the pending sum
  kPendingIsNotReported,   // the coordinator does not hear of pending sums
  kQuorumIsOneTooSmall,    // the coordinator decides by a quorum of one less
  kBoundIsOneTooLarge,     // and by a staleness bound of one more
  kResultsAreOverwritten,  // missed results are not added up: the paper's form
  kRoundsAreNotHeld,       // the coordinator does not hear that a rank has too many untaken results
  kDeliveryIsPartial,      // a delivery arrives only in members where something is pending
  kFlushIsNotBounded,      // after a flush a rank takes rounds that came behind it
};

struct Job {
  Policy policy;
  std::vector<Process> processes;  // by rank
  Bug bug = Bug::kNone;
  bool late_ends = false;  // a round may end on a rank cycles after it has ended on others, as on a device
  bool clock = false;      // time may pass: kLong at once
  bool silence = false;    // where nobody moves and nothing runs, it lasts long enough for rule 7's fallback
  bool queues = false;     // threads hand buckets over or wait for each other by queues: rule 7 may be wrong
  int buckets = 2;
  bool family = false;  // the buckets are one: results are taken as whole rounds
  int replay_limit = 2;
  bool never_sums = false;        // no rank has to add rounds up
  std::vector<int> quorums = {};  // kAuto: each of them may hold from one round to the next, all ranks first
};

// As long as ended ranks wait for blocked ones. A grace period of a job with a clock is as long, so that everything
// that lasts has lasted for no time or for long enough.
inline constexpr Time kLong = std::max(Coordinator::kAbandonAfter, Coordinator::kDeadlockAfter);

// What has happened in an exploration, so that a test can tell that it has seen everything.
struct Coverage {
  std::array<std::size_t, 6> closings{};  // indexed by Closing::Reason
  std::size_t on_time = 0;                // arrivals
  std::size_t late = 0;
  std::size_t while_running = 0;
  std::size_t slipped = 0;
  std::size_t pending_delivered = 0;  // by rounds that were closed without the rank
  std::size_t full_requests = 0;      // arrivals that asked for a full round
  std::size_t late_ends = 0;          // ends of rounds in a later cycle
  std::size_t abandoned = 0;          // jobs whose ended ranks have left
  std::size_t left_out = 0;           // rounds in which a rank is in no group
  std::size_t sent_again = 0;         // models
  std::size_t said_of_some = 0;       // reports of ranks that cannot come to some buckets, and can to others
  std::size_t parted = 0;             // takings that left a round which had ended in some members only
  std::size_t quorum_changes = 0;     // of an adaptive policy
  std::size_t held = 0;               // cycles in which a quorum waited for a rank with too many untaken results
  std::size_t drained = 0;            // rounds taken in the middle of a flush
  std::size_t taken_meanwhile = 0;    // and in that of a collective that is not ours
  std::size_t kept = 0;               // flushes after which a round that came behind them was left
  std::size_t summed = 0;             // takings of several rounds as one
};

// --- One bucket on one rank

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
    Require(entry.own == mine.fresh, "the entry is not what the closing says");
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
    Require(on_time == (entry_.own && !model.delivers), "a result went to the wrong place");
    const bool news = bucket_->last().gradients(rank) > 0;
    if (news) model.finished = result + (keeps() ? 0 : model.finished);
    if (entry_.own) {
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

// --- The whole job

// What may happen next: a step of a thread of the rank whose turn it is, or the next background step.
struct Move {
  bool application = false;
  int thread = 0;          // that takes the step
  int says = 0;            // in its report: the number of an answer of Attendance
  bool later = false;      // and the coordinator decides when time has passed
  bool postpones = false;  // the round does not end on this rank yet
  bool ends = false;       // rounds that were postponed end on this rank
  int quorum = 0;          // kAuto: holds in the round that has opened
};

class World {
 public:
  World(const Job& job, Coverage& coverage)
      : job_(&job),
        coverage_(&coverage),
        attendance_(std::make_shared<Attendance>(job.processes)),
        size_(static_cast<int>(job.processes.size())),
        ranks_(job.processes.size()) {
    Policy policy = job.policy;
    if (job.bug == Bug::kQuorumIsOneTooSmall) --policy.quorum;
    if (job.bug == Bug::kBoundIsOneTooLarge) ++policy.max_staleness;
    policy_ = std::make_shared<const Policy>(policy);
    auto coordinator = std::make_shared<Coordinator>(size_);
    coordinator->SetDeadlockAfter(Coordinator::kDeadlockAfter);
    coordinator_ = std::move(coordinator);
    Handling handling;
    if (job.bug == Bug::kResultsAreOverwritten || policy.grouped()) handling.missed = Missed::kLatest;
    if (policy.rule == Policy::Rule::kReady) handling.late = Late::kDiscard;
    if (KeepsModels()) handling.late = Late::kKeep;
    if (job.family) handling.missed = Missed::kReplay;
    handling.replay_limit = job.replay_limit;
    for (auto& rank : ranks_) {
      while (job.processes[Index(rank.twin)] != ProcessOf(rank)) ++rank.twin;
      for (int b = 0; b < job.buckets; ++b) rank.replicas[Index(b)] = std::make_shared<Replica>(b, handling);
    }
  }

  bool AtStartOfCycle() const { return phase_ == Phase::kReport && turn_ == 0 && undecided_ == 0; }
  bool Done() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const RankState& rank) { return AllAtEnd(rank); });
  }
  // No application can move before a round has ended.
  bool Stuck() const {
    for (Rank rank = 0; rank < size_; ++rank)
      for (int t = 0; t < ThreadsOf(rank); ++t)
        if (CanStep(rank, t)) return false;
    return true;
  }

  std::vector<Move> Moves() const {
    std::vector<Move> moves;
    if (phase_ == Phase::kReport && undecided_ != 0) {
      for (const int quorum : job_->quorums) moves.emplace_back().quorum = quorum;
      return moves;
    }
    if (phase_ == Phase::kReport) {
      for (const int answer : MaySay(turn_)) {
        moves.emplace_back().says = answer;
        if (!TimeMayPass()) continue;
        moves.push_back(moves.back());
        moves.back().later = true;
      }
    } else {
      moves.emplace_back();
    }
    if (phase_ == Phase::kFinish && job_->late_ends && running_[next_].closing->Includes(turn_))
      moves.emplace_back().postpones = true;
    if (phase_ == Phase::kReport && Postponed(ranks_[Index(turn_)])) moves.emplace_back().ends = true;
    for (int t = 0; t < ThreadsOf(turn_); ++t) {
      if (!CanStep(turn_, t)) continue;
      moves.emplace_back().application = true;
      moves.back().thread = t;
    }
    return moves;
  }

  void Apply(Move move) {
    if (move.quorum > 0) {
      SetQuorum(move.quorum);
      return;
    }
    if (move.application) {
      Step(turn_, move.thread);
      return;
    }
    if (move.ends) {
      EndPostponed(turn_);
      return;
    }
    switch (phase_) {
      case Phase::kReport: ReportNext(move); break;
      case Phase::kBegin: BeginNext(); break;
      case Phase::kFinish: FinishNext(move.postpones); break;
    }
  }

  // Would there be another cycle, if nothing happened but that every wait lasted beyond its threshold?
  bool WantsCycle() const {
    const Time deadline = coordinator_->NextDeadline();
    if (deadline <= now_ || (job_->clock && deadline != kNever)) return true;
    for (Rank r = 0; r < size_; ++r) {
      const RankState& rank = ranks_[Index(r)];
      if (rank.wants_join || rank.news || rank.said != MaySay(r).back()) return true;
    }
    return false;
  }
  // What a rank would say then.
  Move Patient() const {
    Move move;
    if (phase_ == Phase::kReport) move.says = MaySay(turn_).back();
    if (phase_ == Phase::kReport && undecided_ != 0) move.quorum = job_->quorums.front();
    move.later = TimeMayPass();
    return move;
  }
  // Every round that was postponed ends.
  void EndPostponed() {
    for (Rank r = 0; r < size_; ++r) EndPostponed(r);
  }

  std::string Describe(Move move) const {
    static const char* const phases[] = {"reports", "begins", "finishes"};
    std::string text = "rank " + std::to_string(turn_) + " ";
    if (move.application) {
      const Thread& thread = ranks_[Index(turn_)].threads[Index(move.thread)];
      return text + "steps (thread " + std::to_string(move.thread) + ", op " + std::to_string(thread.at) + ")";
    }
    if (move.quorum > 0) return "the next round needs " + std::to_string(move.quorum) + " ranks";
    text += move.ends ? "ends what was postponed" : phases[static_cast<int>(phase_)];
    const auto add = [&text](const char* what, const BucketSet& set) {
      if (set.empty()) return;
      text += what;
      if (set.all) text += " all";
      for (const std::string& name : set.names) text += " " + name;
    };
    add(", waiting:", attendance_->answer(move.says).waiting);
    add(", absent:", attendance_->answer(move.says).absent);
    return text + (move.later ? ", later" : "") + (move.postpones ? ", not yet" : "");
  }

  // Everything that the future depends on. Sums are left out: no decision depends on them, and each step has been found
  // right when it was taken. Rounds are left out where only their distance counts. Ranks with the same program that are
  // equally far in the cycle are interchangeable (but for a random initiator, and groups), so they are sorted.
  std::string Key() const {
    std::vector<std::string> ranks;
    for (Rank r = 0; r < size_; ++r) ranks.push_back(KeyOf(r));
    const bool numbers_count = job_->policy.rule == Policy::Rule::kInitiator || job_->policy.grouped();
    if (!numbers_count) {
      std::sort(ranks.begin(), ranks.begin() + turn_);
      std::sort(ranks.begin() + (AtStartOfCycle() ? 0 : turn_ + 1), ranks.end());
    }
    std::string key;
    Put(key, static_cast<int>(phase_) << 4 | turn_ << 2 | static_cast<int>(next_));
    Put(key, (coordinator_->NextDeadline() <= now_) | SinceWhen(stuck_since_) << 1 | SinceWhen(waiting_since_) << 3);
    for (const std::string& rank : ranks) key += rank;
    for (const Open& open : open_) {
      Put(key, SinceWhen(open.quorate) | (numbers_count ? static_cast<int>(open.round) : open.round > 0) << 2);
      Put(key, open.quorum);
      for (const int group : open.groups) Put(key, group);
      Put(key, 0);
    }
    for (const Running& running : running_) Put(key, running.bucket << 3 | static_cast<int>(running.closing->reason));
    return key;
  }

  // After the last step of all ranks: everything that was submitted has been delivered, once, to everybody.
  void CheckEnd() const {
    if (abandoned_) return;
    for (int b = 0; b < job_->buckets; ++b) {
      Require(KeepsModels() || open_[Index(b)].delivered == open_[Index(b)].submitted,
              "contributions are lost at the end");
      for (const auto& rank : ranks_) {
        const Replica& replica = *rank.replicas[Index(b)];
        replica.CheckSeen();
        Require(replica.model.excused || !job_->family || rank.taken == open_[Index(b)].round,
                "a rank has not taken all rounds at the end");
        Require(replica.model.excused || job_->policy.grouped() || replica.model.seen == open_[Index(b)].delivered,
                "a rank lacks results at the end");
      }
    }
  }

 private:
  static std::size_t Index(int i) { return static_cast<std::size_t>(i); }

  enum class Phase : std::uint8_t { kReport, kBegin, kFinish };
  enum class Flush : std::uint8_t { kNone, kRaised, kDelivered, kAllEnded };

  // A round that has been reduced, and has not ended on a rank.
  struct Ending {
    Sum input;
    Sum due;
    bool flushes;
  };
  struct Thread {
    std::uint8_t at = 0;       // in its program
    std::uint8_t drained = 0;  // in a flush: buckets for whose outstanding arrivals it has waited
    bool waits = false;        // in Wait
  };
  struct RankState {
    int twin = 0;  // the first rank with the same programs
    std::array<Thread, kMostThreads> threads;
    int said = 0;             // in its last report: where it cannot come
    std::uint8_t sent = 0;    // arrivals reported in this cycle, a bit for each bucket
    bool news = false;        // something to report
    bool wants_join = false;  // in the queue
    bool joined = false;
    Flush flush = Flush::kNone;  // the application's view
    Report::Flush level = Report::Flush::kNone;
    std::uint8_t flush_rounds = 0;              // to be finished
    Report::Flush over = Report::Flush::kNone;  // what has ended with them
    std::array<Sum, kMostBuckets> owed{};       // what was pending when the flush began
    Round taken = 0;                            // rounds of the family
    int full = 0;                               // buckets that were, by the last report: a bit for each
    bool drains = false;                        // and it took results meanwhile
    std::array<Round, kMostBuckets> flush_end{kForEver, kForEver, kForEver};  // no round from there on is taken
    std::array<std::shared_ptr<const Ending>, kMostBuckets> postponed;
    std::array<std::shared_ptr<Replica>, kMostBuckets> replicas;
    std::shared_ptr<const Report> report;
  };
  // The model of the coordinator's bucket.
  struct Open {
    Round round = 0;
    int arrived = 0;        // a bit for each rank
    int full = 0;           // those that have asked for a full round
    Time quorate = kNever;  // since when a quorum has arrived
    int quorum = 0;         // kAuto: of this round
    std::array<Round, kMostRanks> last_contribution{-1, -1, -1};
    Sum submitted = 0;
    Sum delivered = 0;
    std::vector<int> groups;             // all that have formed of ready ranks, as bits
    std::array<Sum, kMostRanks> used{};  // with Late::kKeep: the model that was in this rank's last round
  };
  struct Running {
    int bucket = 0;
    std::shared_ptr<const Closing> closing;
    std::array<Sum, kMostRanks> due{};     // from each rank
    std::array<Sum, kMostRanks> inputs{};  // what it sends

    // What the result of this rank's group should be.
    Sum Result(Rank rank) const {
      Sum sum = 0;
      for (const Rank member : closing->members(rank)) sum += due[Index(member)];
      return sum;
    }
  };

  static void Put(std::string& key, int value) { key += static_cast<char>(value); }

  std::string KeyOf(Rank r) const {
    const RankState& rank = ranks_[Index(r)];
    std::string key;
    Put(key, rank.twin);
    for (int t = 0; t < ThreadsOf(r); ++t) {
      const Thread& thread = rank.threads[Index(t)];
      Put(key, thread.at << 3 | thread.drained << 1 | thread.waits);
    }
    Put(key, rank.said);
    Put(key, rank.sent << 2 | rank.joined << 6 | rank.wants_join << 7);
    Put(key,
        static_cast<int>(rank.flush) | static_cast<int>(rank.level) << 2 | rank.flush_rounds << 4 | rank.news << 6);
    for (int b = 0; b < job_->buckets; ++b) {
      const Bucket& bucket = rank.replicas[Index(b)]->bucket();
      const Replica::Model& model = rank.replicas[Index(b)]->model;
      const Open& open = open_[Index(b)];
      Put(key, static_cast<int>(bucket.state()) | bucket.reported() << 2 | model.missed << 3 | model.outstanding << 4 |
                   bucket.declared() << 5 | (open.arrived >> r & 1) << 6 | model.delivers << 7);
      Put(key, model.cleared | model.discards << 1 | model.wants_full << 2 |
                   (rank.postponed[Index(b)] != nullptr) << 3 | (open.full >> r & 1) << 4 |
                   static_cast<int>(rank.over) << 5 | Owes(rank, b) << 7);
      Put(key, model.left_out);
      Put(key, model.later_gradients | model.announced_gradients << 4);
      if (job_->family) {
        Put(key, bucket.untaken() | bucket.oldest_rounds() << 4);
        Put(key, model.held | (rank.full >> b & 1) << 1 | 4 * static_cast<int>(open.round - rank.taken));
        Put(key,
            rank.flush_end[Index(b)] == kForEver ? 0 : static_cast<int>(open.round - rank.flush_end[Index(b)]) + 2);
      }
      Put(key, model.arrival_gradients | std::min(bucket.ReportLate(), 3) << 4);
      Put(key,
          static_cast<int>(std::min(open.round - open.last_contribution[Index(r)], job_->policy.max_staleness + 2)));
    }
    int fresh = 0;
    for (const Running& running : running_)
      fresh = fresh << 2 | running.closing->contributions[Index(r)].fresh << 1 | running.closing->Includes(r);
    Put(key, fresh);
    return key;
  }

  const Process& ProcessOf(const RankState& rank) const {
    return job_->processes[Index(static_cast<int>(&rank - ranks_.data()))];
  }
  int ThreadsOf(Rank r) const { return static_cast<int>(job_->processes[Index(r)].size()); }
  const Program& ProgramOf(const RankState& rank, int t) const { return ProcessOf(rank)[Index(t)]; }
  bool AtEnd(const RankState& rank, int t) const { return rank.threads[Index(t)].at == ProgramOf(rank, t).size(); }
  bool AllAtEnd(const RankState& rank, int first = 0) const {
    const int threads = static_cast<int>(ProcessOf(rank).size());
    for (int t = first; t < threads; ++t)
      if (!AtEnd(rank, t)) return false;
    return true;
  }
  const Op* OpOf(const RankState& rank, int t) const {
    return AtEnd(rank, t) ? nullptr : &ProgramOf(rank, t)[rank.threads[Index(t)].at];
  }

  // Copies share their replicas until one of them changes it.
  Replica& Change(RankState& rank, int bucket) {
    auto& replica = rank.replicas[Index(bucket)];
    if (replica.use_count() > 1) replica = std::make_shared<Replica>(*replica);
    return *replica;
  }

  // --- Applications

  bool HasReached(const RankState& rank, int t, Op::Kind kind) const {
    const Program& program = ProgramOf(rank, t);
    const auto first = std::find_if(program.begin(), program.end(), [kind](const Op& op) { return op.kind == kind; });
    return first != program.end() && program.begin() + rank.threads[Index(t)].at >= first;
  }
  bool ForeignCompletes() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const RankState& rank) {
      bool reached = false;
      for (int t = 0; t < static_cast<int>(ProcessOf(rank).size()); ++t)
        reached = reached || HasReached(rank, t, Op::Kind::kForeign);
      return reached;
    });
  }
  bool AllMeet(const RankState& rank) const {
    for (int t = 0; t < static_cast<int>(ProcessOf(rank).size()); ++t)
      if (!HasReached(rank, t, Op::Kind::kMeet)) return false;
    return true;
  }

  bool CanStep(Rank r, int t) const {
    const RankState& rank = ranks_[Index(r)];
    const Op* op = OpOf(rank, t);
    if (op == nullptr || rank.threads[Index(t)].waits) return false;
    switch (op->kind) {
      case Op::Kind::kArrive:
      case Op::Kind::kWait:
      case Op::Kind::kTake:
      case Op::Kind::kDeliver:
      case Op::Kind::kClear: return true;
      case Op::Kind::kFlush: return rank.flush != Flush::kRaised || RoundsToTake(rank) > 0;
      case Op::Kind::kEnd: return (rank.flush != Flush::kRaised || RoundsToTake(rank) > 0) && AllAtEnd(rank, 1);
      case Op::Kind::kForeign: return ForeignCompletes() || IsDue(rank);
      case Op::Kind::kJoin: return !rank.wants_join && !rank.joined;
      case Op::Kind::kMeet: return AllMeet(rank);
    }
    return false;
  }

  static bool IsFlush(const Op& op) { return op.kind == Op::Kind::kFlush || op.kind == Op::Kind::kEnd; }
  // The bucket for which a thread waits.
  int AwaitedBy(const RankState& rank, int t) const {
    const Op& op = *OpOf(rank, t);
    if (job_->family && op.kind == Op::Kind::kDeliver) return rank.replicas[0]->model.outstanding ? 0 : 1;
    return IsFlush(op) ? rank.threads[Index(t)].drained : op.bucket;
  }
  bool IsParked(const RankState& rank, int t) const {
    const Op* op = OpOf(rank, t);
    return op != nullptr && op->kind == Op::Kind::kForeign && !ForeignCompletes();
  }

  void Step(Rank r, int t) {
    RankState& rank = ranks_[Index(r)];
    Thread& thread = rank.threads[Index(t)];
    const Op op = *OpOf(rank, t);
    switch (op.kind) {
      case Op::Kind::kArrive: {
        int step = 0;
        for (int each = 0; each < ThreadsOf(r); ++each) {
          const Program& program = ProgramOf(rank, each);
          const Op arrival{Op::Kind::kArrive, op.bucket};
          step +=
              static_cast<int>(std::count(program.begin(), program.begin() + rank.threads[Index(each)].at, arrival));
        }
        const Sum contribution = Contribution(r, op.bucket, step);
        open_[Index(op.bucket)].submitted += contribution;
        Arrive(rank, op.bucket, contribution);
        ++thread.at;
        break;
      }
      case Op::Kind::kWait: ++thread.at; break;
      case Op::Kind::kTake: {
        const Round before = rank.taken;
        while (RoundsToTake(rank) > 0) TakeRound(rank);
        const bool meanwhile = thread.at > 2 && ProgramOf(rank, t)[thread.at - 3u].kind == Op::Kind::kForeign;
        Require(rank.taken > before || meanwhile, "a step ends without a whole round");
        for (int b = 0; b < job_->buckets; ++b)
          coverage_->parted += rank.replicas[Index(b)]->bucket().untaken() > 0 ? 1 : 0;
        ++thread.at;
        break;
      }
      case Op::Kind::kDeliver:
        if (job_->family) {
          DeliverFamily(rank, thread);
        } else if (rank.replicas[Index(op.bucket)]->bucket().HasPending()) {
          Arrive(rank, op.bucket, 0);
        } else {
          ++thread.at;
        }
        break;
      case Op::Kind::kFlush:
      case Op::Kind::kEnd: StepFlush(rank, t); return;
      case Op::Kind::kForeign:
        if (!ForeignCompletes()) {
          TakeRound(rank);
          ++coverage_->taken_meanwhile;
          return;
        }
        ++thread.at;
        break;
      case Op::Kind::kMeet: ++thread.at; break;
      case Op::Kind::kJoin:
        rank.wants_join = true;
        for (int b = 0; b < job_->buckets; ++b) Change(rank, b).model.excused = true;
        break;
      case Op::Kind::kClear:
        if (job_->family) {
          ClearFamily(r);
        } else {
          Clear(r, op.bucket, 0);
        }
        ++thread.at;
        break;
    }
    FallAsleep(rank, t);
  }

  // A round that has closed, and has not begun here, was to deliver what is now forgotten.
  void Clear(Rank r, int bucket, Round complete) {
    RankState& rank = ranks_[Index(r)];
    Open& open = open_[Index(bucket)];
    const Sum later = KeepsModels() ? 0 : rank.replicas[Index(bucket)]->model.later;
    const Sum forgotten = Change(rank, bucket).Clear(complete);
    open.submitted -= forgotten;
    for (Running& running : running_) {
      if (phase_ != Phase::kBegin || running.bucket != bucket || &running < &running_[next_]) continue;
      running.due[Index(r)] -= forgotten - later;
      open.delivered -= forgotten - later;
    }
  }

  // --- Families

  // So many rounds have ended in all members, and come as one; 0 for none.
  int RoundsToTake(const RankState& rank) const {
    if (!job_->family) return 0;
    int rounds = 0;
    for (int b = 0; b < job_->buckets; ++b)
      rounds = std::max(rounds, rank.replicas[Index(b)]->bucket().oldest_rounds());
    for (int b = 0; b < job_->buckets; ++b) {
      const Bucket& bucket = rank.replicas[Index(b)]->bucket();
      if (bucket.untaken() < rounds ||
          (bucket.taken() + rounds > rank.flush_end[Index(b)] && job_->bug != Bug::kFlushIsNotBounded))
        return 0;
    }
    return rounds;
  }
  // A thread that waits for something else takes a round when there is room for at most one more. It is in no step, or
  // its step's arrivals have ended.
  bool IsDue(const RankState& rank) const {
    if (RoundsToTake(rank) == 0) return false;
    bool nearly_full = false;
    for (int b = 0; b < job_->buckets; ++b) {
      const Replica& replica = *rank.replicas[Index(b)];
      if (replica.model.outstanding) return false;
      nearly_full = nearly_full || replica.bucket().untaken() + 1 >= job_->replay_limit;
    }
    return nearly_full;
  }
  bool TakesMeanwhile(const RankState& rank) const {
    const Op* op = OpOf(rank, 0);
    return job_->family && op != nullptr && op->kind == Op::Kind::kForeign && job_->bug != Bug::kForeignDoesNotDrain;
  }
  void TakeRound(RankState& rank) {
    const int rounds = RoundsToTake(rank);
    Require(rounds == 1 || !job_->never_sums, "rounds are added up");
    for (int b = 0; b < job_->buckets; ++b) {
      Replica& replica = Change(rank, b);
      Require(replica.bucket().taken() == rank.taken, "members of a family are taken out of step");
      rank.news = rank.news || replica.bucket().full();
      replica.TakeRounds(rounds);
    }
    rank.taken += rounds;
    coverage_->summed += rounds > 1 ? 1 : 0;
  }
  // A step without a gradient: it arrives where the oldest round that is open in some member is open.
  void DeliverFamily(RankState& rank, Thread& thread) {
    bool pending = false;
    for (int b = 0; b < job_->buckets; ++b) pending = pending || rank.replicas[Index(b)]->bucket().HasPending();
    if (!pending) {
      ++thread.at;
      return;
    }
    const Round open = Complete(rank);
    for (int b = 0; b < job_->buckets; ++b) {
      const Bucket& bucket = rank.replicas[Index(b)]->bucket();
      const bool partial = job_->bug == Bug::kDeliveryIsPartial && !bucket.HasPending();
      if (bucket.completed() == open && !partial) Arrive(rank, b, 0);
    }
  }
  void LeaveOut(Rank r, int bucket, Round completed) {
    if (!job_->family) return;
    RankState& rank = ranks_[Index(r)];
    Replica& replica = Change(rank, bucket);
    replica.LeaveOut(completed);
    rank.taken = std::max(rank.taken, replica.bucket().taken());
  }
  Round Complete(const RankState& rank) const {
    Round complete = kForEver;
    for (int b = 0; b < job_->buckets; ++b)
      complete = std::min(complete, rank.replicas[Index(b)]->bucket().completed());
    return complete;
  }
  void ClearFamily(Rank r) {
    RankState& rank = ranks_[Index(r)];
    rank.taken = Complete(rank);
    for (int b = 0; b < job_->buckets; ++b) Clear(r, b, rank.taken);
  }

  // Waits that are over are no steps of their own.
  void FallAsleep(RankState& rank, int t) {
    Thread& thread = rank.threads[Index(t)];
    thread.waits = false;
    for (const Op* op = OpOf(rank, t); op != nullptr; op = OpOf(rank, t)) {
      if (op->kind != Op::Kind::kWait && op->kind != Op::Kind::kDeliver) return;
      const bool family = job_->family && op->kind == Op::Kind::kDeliver;
      thread.waits = rank.replicas[Index(family ? AwaitedBy(rank, t) : op->bucket)]->model.outstanding;
      if (thread.waits || op->kind == Op::Kind::kDeliver) return;
      ++thread.at;
    }
  }

  void Arrive(RankState& rank, int bucket, Sum contribution) {
    rank.news = true;
    switch (Change(rank, bucket).Arrive(contribution)) {
      case Bucket::Arrived::kOnTime: ++coverage_->on_time; break;
      case Bucket::Arrived::kLate: ++coverage_->late; break;
      case Bucket::Arrived::kWaiting: ++coverage_->while_running; break;
      case Bucket::Arrived::kBusy: throw Violation("an arrival is refused");
    }
  }

  // First it waits for whatever is outstanding, of other threads too.
  void StepFlush(RankState& rank, int t) {
    Thread& thread = rank.threads[Index(t)];
    const bool ends = OpOf(rank, t)->kind == Op::Kind::kEnd;
    const Flush enough = ends ? Flush::kAllEnded : Flush::kDelivered;
    if (rank.flush == Flush::kRaised) {
      TakeRound(rank);
      ++coverage_->drained;
      return;
    }
    if (rank.flush < enough) {
      for (; thread.drained < job_->buckets; ++thread.drained) {
        thread.waits = rank.replicas[thread.drained]->model.outstanding;
        if (thread.waits) return;
      }
      rank.flush = Flush::kRaised;
      rank.level = ends ? Report::Flush::kEnding : Report::Flush::kFlushing;
      rank.news = true;
      for (int b = 0; b < job_->buckets; ++b) {
        const Replica::Model& model = rank.replicas[Index(b)]->model;
        rank.owed[Index(b)] = KeepsModels() ? 0 : model.later + model.announced;
      }
      return;
    }
    rank.flush = Flush::kNone;
    thread.drained = 0;
    if (job_->family) {
      while (RoundsToTake(rank) > 0) TakeRound(rank);
      for (int b = 0; b < job_->buckets; ++b) {
        coverage_->kept += rank.replicas[Index(b)]->bucket().untaken() > 0 ? 1 : 0;
        const Round end = std::exchange(rank.flush_end[Index(b)], kForEver);
        Require(end == kForEver || rank.taken == end || Excused(rank), "a rank leaves a flush with other rounds");
      }
      ++thread.at;
      FallAsleep(rank, t);
      return;
    }
    for (int b = 0; b < job_->buckets; ++b)
      if (rank.replicas[Index(b)]->bucket().HasMissed() && !OthersUse(rank, t, b)) Change(rank, b).Take();
    ++thread.at;
    FallAsleep(rank, t);
  }
  static bool Excused(const RankState& rank) { return rank.replicas[0]->model.excused; }
  // Another thread has still something to do there.
  bool OthersUse(const RankState& rank, int t, int bucket) const {
    for (int other = 0; other < static_cast<int>(ProcessOf(rank).size()); ++other) {
      const Program& program = ProgramOf(rank, other);
      const auto uses = [bucket](const Op& op) { return op.kind == Op::Kind::kArrive && op.bucket == bucket; };
      if (other != t && !AtEnd(rank, other) && std::any_of(program.begin(), program.end(), uses)) return true;
    }
    return false;
  }
  // What was pending when the flush began has not been delivered.
  bool Owes(const RankState& rank, int bucket) const {
    const Sum owed = rank.owed[Index(bucket)];
    return (open_[Index(bucket)].delivered & owed) != owed;
  }

  // --- Where a rank can come

  // All that it may say now; at last what it would say if everything that lasts had lasted for long.
  std::vector<int> MaySay(Rank r) const {
    const RankState& rank = ranks_[Index(r)];
    using Does = Attending::Thread::Does;
    Attending question;
    std::vector<std::size_t> choices;  // threads whose waits may have lasted for long or not
    bool anybody = false;
    bool flushes = false;
    for (int b = 0; b < job_->buckets; ++b) question.open |= (IsOpen(rank, b) ? 1 : 0) << b;
    for (int t = 0; t < ThreadsOf(r); ++t) {
      Attending::Thread& thread = question.threads[Index(t)];
      thread.at = rank.threads[Index(t)].at;
      const Op* op = OpOf(rank, t);
      if (rank.threads[Index(t)].waits) {
        if (job_->bug == Bug::kWaitingIsNotReported) continue;
        thread.does = Does::kWait;
        thread.bucket = static_cast<std::uint8_t>(AwaitedBy(rank, t));
        if (IsOpen(rank, thread.bucket)) choices.push_back(Index(t));
      } else if (IsParked(rank, t)) {
        if (job_->bug == Bug::kParkedIsNotReported) continue;
        thread.does = Does::kPark;
        choices.push_back(Index(t));
      } else if (op != nullptr && IsFlush(*op) && rank.level != Report::Flush::kNone) {
        thread.does = op->kind == Op::Kind::kEnd ? Does::kEnd : Does::kFlush;
        flushes = true;
      } else {
        continue;
      }
      anybody = true;
    }
    std::vector<int> answers;
    if (!anybody) return {0};
    const auto add = [&](bool waits) {
      int answer = attendance_->Ask(r, question);
      Attendance::Answer changed = attendance_->answer(answer);
      if (waits && job_->bug == Bug::kWaitingIsOneFlag) changed.waiting = {true, {}};
      if (flushes && job_->bug == Bug::kFlushIsOneFlag) changed.absent = {true, {}};
      answer = attendance_->NumberOf(changed);
      answers.erase(std::remove(answers.begin(), answers.end(), answer), answers.end());
      answers.push_back(answer);
    };
    for (std::size_t chosen = 0; chosen < std::size_t{1} << choices.size(); ++chosen) {
      for (std::size_t i = 0; i < choices.size(); ++i)
        question.threads[choices[i]].long_enough = (chosen >> i & 1) != 0;
      add(chosen > 0);
    }
    const bool runs = std::any_of(ranks_.begin(), ranks_.end(), Postponed);
    if (job_->silence && job_->bug != Bug::kSilenceIsNotNoticed && !runs && Stuck()) {
      question.silent = true;
      add(true);
    }
    return answers;
  }
  // Something has arrived there, and its round has not begun.
  static bool IsOpen(const RankState& rank, int bucket) {
    return rank.replicas[Index(bucket)]->bucket().state() == Bucket::State::kArrived;
  }

  // What a rank says must be true: nobody comes there before another round has closed. Nothing is claimed where there
  // are queues; nor of a bucket that has had no round, since round 0 waits for whoever waits.
  void CheckWhereItCannotCome(Rank r, const Attendance::Answer& answer) const {
    if (job_->queues) return;
    for (int b = 0; b < job_->buckets; ++b) {
      if (open_[Index(b)].round == 0) continue;
      if (!answer.absent.Has(NameOf(b)) && !answer.waiting.Has(NameOf(b))) continue;
      for (int t = 0; t < ThreadsOf(r); ++t)
        Require(!MayCome(ranks_[Index(r)], t, b), "a rank says that it cannot come where a thread of it may");
    }
  }
  bool MayCome(const RankState& rank, int t, int bucket) const {
    const Op* op = OpOf(rank, t);
    const Program& program = ProgramOf(rank, t);
    const bool comes =
        std::any_of(program.begin() + rank.threads[Index(t)].at, program.end(), [bucket](const Op& each) {
          return (each.kind == Op::Kind::kArrive || each.kind == Op::Kind::kDeliver) && each.bucket == bucket;
        });
    if (!comes || IsParked(rank, t)) return false;
    if (rank.threads[Index(t)].waits) return !IsOpen(rank, AwaitedBy(rank, t));
    return !IsFlush(*op) || rank.level == Report::Flush::kNone;
  }

  // --- The background thread

  void ReportNext(Move move) {
    RankState& rank = ranks_[Index(turn_)];
    if (std::exchange(rank.wants_join, false)) rank.joined = true;
    for (int b = 0; b < job_->buckets && rank.joined; ++b)
      LeaveOut(turn_, b, rank.replicas[Index(b)]->bucket().completed());
    rank.said = move.says;
    rank.news = false;
    Report report;
    const Attendance::Answer& answer = attendance_->answer(move.says);
    CheckWhereItCannotCome(turn_, answer);
    coverage_->said_of_some += answer.waiting.names.empty() ? 0 : 1;
    report.waiting = answer.waiting;
    report.blocked = answer.blocked;
    report.absent = answer.absent;
    report.flush = rank.level;
    rank.full = 0;
    rank.drains = IsDraining(rank);
    for (int b = 0; b < job_->buckets; ++b) {
      Report::Item item;
      item.bucket = rank.replicas[Index(b)]->bucket().name();
      const Bucket& bucket = rank.replicas[Index(b)]->bucket();
      if (rank.postponed[Index(b)] != nullptr) {
        item.kind = Report::Item::Kind::kRunning;
      } else if (bucket.state() == Bucket::State::kArrived && !bucket.reported()) {
        open_[Index(b)].full |= rank.replicas[Index(b)]->model.wants_full << turn_;
        coverage_->full_requests += rank.replicas[Index(b)]->model.wants_full ? 1 : 0;
        rank.sent = static_cast<std::uint8_t>(rank.sent | 1 << b);
        item.gradients = Change(rank, b).ReportArrival();
        item.full = rank.replicas[Index(b)]->bucket().wants_full_round();
        if (!rank.replicas[Index(b)]->bucket().declared()) item.declaration = Declaration{*policy_};
      } else {
        item.kind = Report::Item::Kind::kPending;
        item.gradients = Change(rank, b).ReportPending();
        item.late = rank.replicas[Index(b)]->bucket().ReportLate();
        if (job_->family && rank.replicas[Index(b)]->model.untaken.size() >= Index(job_->replay_limit)) {
          rank.full |= 1 << b;
          item.backlog = rank.drains ? Report::Backlog::kDraining : Report::Backlog::kFull;
        }
        if (job_->bug == Bug::kRoundsAreNotHeld) item.backlog = Report::Backlog::kNone;
        if (item.gradients == 0 && item.backlog == Report::Backlog::kNone) continue;
        if (item.gradients == 0 && job_->bug != Bug::kPendingIsNotReported) {
          report.items.push_back(std::move(item));
          continue;
        }
        if (item.gradients == 0 || job_->bug == Bug::kPendingIsNotReported) continue;
      }
      report.items.push_back(std::move(item));
    }
    rank.report = std::make_shared<const Report>(std::move(report));
    if (++turn_ < size_) return;
    turn_ = 0;
    if (move.later) now_ += kLong;
    Decide();
  }

  // From the moment at which it raises its flag until the last round of the flush has been taken.
  bool IsDraining(const RankState& rank) const {
    if (rank.level != Report::Flush::kNone || TakesMeanwhile(rank)) return true;
    return std::any_of(rank.flush_end.begin(), rank.flush_end.end(), [](Round end) { return end != kForEver; });
  }

  void Decide() {
    auto coordinator = std::make_shared<Coordinator>(*coordinator_);
    std::vector<bool> joined;
    for (Rank r = 0; r < size_; ++r) {
      RankState& rank = ranks_[Index(r)];
      coordinator->Observe(r, *rank.report, now_);
      joined.push_back(rank.joined);
      for (int b = 0; b < job_->buckets; ++b) open_[Index(b)].arrived |= (rank.sent >> b & 1) << r;
    }
    if (job_->bug != Bug::kJoinedIsNotTold) coordinator->SetJoined(joined);
    running_.clear();
    CountTime();
    for (Closing& closing : coordinator->Decide(now_)) Check(std::move(closing));
    coordinator_ = std::move(coordinator);
    const bool flushed = std::any_of(running_.begin(), running_.end(), [](const Running& running) {
      return running.closing->flush_over != Report::Flush::kNone;
    });
    for (int b = 0; b < job_->buckets; ++b) {
      for (const RankState& rank : ranks_)
        Require(!flushed || abandoned_ || !Owes(rank, b), "contributions are lost in a flush");
      Require(!MustHaveClosed(b), "a round stays open although its policy is satisfied");
    }
    for (RankState& rank : ranks_) {
      rank.sent = 0;
      rank.report.reset();
    }
    if (std::all_of(joined.begin(), joined.end(), [](bool each) { return each; })) {
      for (RankState& rank : ranks_) {
        rank.joined = false;
        ++rank.threads[0].at;
      }
    }
    if (running_.empty()) return;
    phase_ = Phase::kBegin;
    SkipJoined();
  }

  // The one step that is not the coordinator's own: what an adaptive policy may come to is not explored, but all of it
  // is tried. Buckets whose rounds have opened together get the same quorum, as they do in a job.
  void SetQuorum(int quorum) {
    auto coordinator = std::make_shared<Coordinator>(*coordinator_);
    for (int b = 0; b < job_->buckets; ++b) {
      if ((undecided_ >> b & 1) == 0) continue;
      CoordinatorPeer::SetQuorum(*coordinator, NameOf(b), quorum);
      coverage_->quorum_changes += open_[Index(b)].quorum != quorum ? 1 : 0;
      open_[Index(b)].quorum = quorum;
    }
    coordinator_ = std::move(coordinator);
    undecided_ = 0;
  }

  // A rank whose round has not ended says so, and has sent nothing else of that bucket.
  bool Runs(int bucket) const {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [&](const RankState& rank) { return rank.postponed[Index(bucket)] != nullptr; });
  }
  static bool Postponed(const RankState& rank) {
    return std::any_of(rank.postponed.begin(), rank.postponed.end(), [](const auto& each) { return each != nullptr; });
  }

  // --- The clock

  // 0: not at all, 1: for no time, 2: for long.
  int SinceWhen(Time since) const { return since == kNever ? 0 : since == now_ ? 1 : 2; }
  // And it makes a difference.
  bool TimeMayPass() const {
    return job_->clock && phase_ == Phase::kReport && turn_ + 1 == size_ &&
           (stuck_since_ == now_ || waiting_since_ == now_ ||
            std::any_of(open_.begin(), open_.end(), [&](const Open& open) { return open.quorate == now_; }));
  }
  // Since when what the reports say has been so.
  void CountTime() {
    bool stuck = std::none_of(ranks_.begin(), ranks_.end(), Postponed);
    bool waiting = stuck;
    bool anybody_ended = false;
    for (const RankState& rank : ranks_) {
      waiting = waiting && (rank.joined || rank.report->blocked);
      const bool ended = rank.level == Report::Flush::kEnding;
      anybody_ended = anybody_ended || ended;
      stuck = stuck && rank.level != Report::Flush::kFlushing && (ended || CannotComeAnywhere(rank));
    }
    stuck_since_ = stuck && anybody_ended ? std::min(stuck_since_, now_) : kNever;
    waiting_since_ = waiting ? std::min(waiting_since_, now_) : kNever;
    for (Open& open : open_) open.quorate = IsQuorate(open) ? std::min(open.quorate, now_) : kNever;
  }
  bool IsQuorate(const Open& open) const {
    int active = 0;
    int arrived = 0;
    for (Rank r = 0; r < size_; ++r) {
      active += ranks_[Index(r)].joined ? 0 : 1;
      arrived += open.arrived >> r & 1;
    }
    return open.round > 0 && arrived > 0 && arrived >= std::min(QuorumOf(open), active);
  }
  int QuorumOf(const Open& open) const { return IsAuto() ? open.quorum : job_->policy.quorum; }
  bool IsAuto() const { return job_->policy.rule == Policy::Rule::kAuto; }
  // Where the policy is a quorum, and cannot have been too stale; or ready ranks are as many as a group.
  bool MustHaveClosed(int b) const {
    const Open& open = open_[Index(b)];
    const Policy& policy = job_->policy;
    if (Runs(b) || open.full != 0 || IsFullRound(policy, open.round)) return false;
    for (const RankState& rank : ranks_) {
      if ((rank.full >> b & 1) == 0) continue;
      coverage_->held += open.quorate != kNever ? 1 : 0;
      return false;
    }
    if (policy.rule == Policy::Rule::kReady) return open.round > 0 && Count(open.arrived) >= SizeOfGroup();
    return (policy.rule == Policy::Rule::kQuorum || IsAuto()) && policy.max_staleness > kMostSteps &&
           open.quorate != kNever && now_ - open.quorate >= policy.grace && job_->bug == Bug::kNone;
  }

  bool KeepsModels() const { return job_->policy.schedule.kind != Schedule::Kind::kNone; }
  static int Count(int bits) { return (bits & 1) + (bits >> 1 & 1) + (bits >> 2 & 1); }
  int SizeOfGroup() const { return std::min(job_->policy.group_size, size_); }

  static bool IsFlush(const Closing& closing) {
    return closing.reason == Closing::Reason::kFlush || closing.reason == Closing::Reason::kEnd;
  }
  // By what they said in this cycle.
  static bool IsExempt(const RankState& rank, int bucket) {
    return rank.joined || rank.report->absent.Has(NameOf(bucket));
  }
  static bool CannotCome(const RankState& rank, int bucket) {
    return IsExempt(rank, bucket) || rank.report->waiting.Has(NameOf(bucket));
  }
  static bool CannotComeAnywhere(const RankState& rank) {
    return rank.joined || rank.report->absent.all || rank.report->waiting.all;
  }

  // The rules, said once more in the plainest words.
  void Check(Closing closing) {
    const int b = closing.bucket.at(0) - NameOf(0).at(0);
    Open& open = open_[Index(b)];
    const Policy& policy = job_->policy;
    using Reason = Closing::Reason;
    Require(closing.error.empty(), "a round is refused");
    Require(!Runs(b), "a round is closed while the one before has not ended everywhere");
    Require(closing.round == open.round, "a round is closed twice, or one is left out");
    for (const Running& other : running_) Require(other.bucket != b, "two rounds of a bucket are closed at once");

    Running running;
    int active = 0;
    int fresh = 0;
    int members = 0;  // a bit for each
    bool nobody_can_come = true;
    bool all_flush = true;
    bool all_end = true;
    bool drains = false;  // some rank, and is full
    for (Rank r = 0; r < size_; ++r) {
      const RankState& rank = ranks_[Index(r)];
      const Replica::Model& model = rank.replicas[Index(b)]->model;
      const Closing::Contribution& contribution = closing.contributions[Index(r)];
      if (rank.joined) {
        Require(!contribution.fresh && contribution.gradients == 0, "a joined rank contributes");
        LeaveOut(r, b, open.round + 1);
        continue;
      }
      if ((rank.full >> b & 1) != 0) {
        drains = drains || rank.drains;
        Require(closing.reason != Reason::kQuorum || IsExempt(rank, b) || (open.arrived >> r & 1) != 0,
                "a rank gets more untaken results than it may have");
      }
      ++active;
      all_flush = all_flush && rank.level != Report::Flush::kNone;
      all_end = all_end && rank.level == Report::Flush::kEnding;
      const bool arrived = (open.arrived >> r & 1) != 0;
      nobody_can_come = nobody_can_come && (arrived || CannotCome(rank, b));
      if (!closing.Includes(r)) {
        Require(!contribution.fresh && contribution.gradients == 0, "a rank contributes that is in no group");
        continue;
      }
      members |= 1 << r;
      Require(contribution.fresh == arrived, "a contribution is called fresh that is not, or not fresh that is");
      fresh += arrived ? 1 : 0;
      if (arrived) open.used[Index(r)] = model.arrival;
      running.due[Index(r)] = rank.replicas[Index(b)]->DueFrom(contribution);
      const bool again = KeepsModels() && !arrived && contribution.gradients > 0 &&
                         std::exchange(open.used[Index(r)], running.due[Index(r)]) == running.due[Index(r)];
      coverage_->sent_again += again ? 1 : 0;
      Require(contribution.gradients == 0 || contribution.stale == again,
              "a model is called stale that is not, or not stale that is");
      if (contribution.gradients > 0 && !contribution.stale) {
        open.last_contribution[Index(r)] = open.round;
      } else if (contribution.gradients > 0) {
        Require(open.round - open.last_contribution[Index(r)] <= policy.max_staleness,
                "a model is sent that is too old");
      } else if (closing.reason == Reason::kQuorum && !arrived && !IsExempt(rank, b)) {
        Require(open.round - open.last_contribution[Index(r)] <= policy.max_staleness, "the staleness bound is broken");
      }
    }
    Require(!drains || (closing.reason == Reason::kEnd && !all_end), "a round does not wait for a rank that drains");
    CheckGroups(closing, open, fresh == active);
    const bool first = closing.reason == Reason::kFirst;
    Require(first == (open.round == 0), "round 0, and no other, is closed as the first");
    if (first || closing.reason == Reason::kEverybody) Require(fresh == active, "a rank is missing in a full round");
    if (closing.reason == Reason::kQuorum) {
      Require(open.full == 0 && !IsFullRound(policy, open.round), "a full round is closed by its policy");
      Require(policy.grace == Time(0) || now_ - open.quorate >= policy.grace, "the grace period is cut short");
      if (policy.rule == Policy::Rule::kInitiator) {
        Rank initiator = Initiator(policy, open.round, size_);
        while (ranks_[Index(initiator)].joined) initiator = (initiator + 1) % size_;
        Require(closing.contributions[Index(initiator)].fresh, "the initiator is missing");
      } else if (policy.rule == Policy::Rule::kQuorum || IsAuto()) {
        Require(fresh >= std::min(QuorumOf(open), active), "the quorum is not reached");
      }
    }
    if (closing.reason == Reason::kLiveness) {
      Require(fresh > 0 && nobody_can_come, "a round is closed by liveness while a rank may come");
      Require(running_.empty(), "another round is closed beside one by liveness");
    }
    if (closing.reason == Reason::kEnd && !all_end) {
      Require(stuck_since_ != kNever && now_ - stuck_since_ >= kLong, "ended ranks leave while others may come");
      abandoned_ = true;
      ++coverage_->abandoned;
    } else if (IsFlush(closing)) {
      Require(all_flush && fresh == 0, "a flush while a rank works");
      Require((closing.reason == Reason::kEnd) == all_end, "the end is called before all have come to it");
    }
    Require(!IsAuto() || closing.quorum == (first ? size_ : open.quorum), "a closing names another quorum");
    if (IsAuto()) undecided_ |= 1 << b;
    waiting_since_ = kNever;
    ++coverage_->closings[static_cast<std::size_t>(closing.reason)];
    coverage_->pending_delivered += static_cast<std::size_t>(closing.gradients() > fresh);
    open.arrived &= ~members;
    open.full &= ~members;
    open.quorate = kNever;
    open.round += members != 0 || !policy.grouped() ? 1 : 0;  // with groups a flush has nothing to deliver
    for (const Sum due : running.due) open.delivered += due;
    Require(KeepsModels() || !HasDuplicates(open.delivered), "a contribution is delivered twice");
    running.bucket = b;
    running.closing = std::make_shared<const Closing>(std::move(closing));
    running_.push_back(std::move(running));
  }

  // Who reduces together, by the policy.
  void CheckGroups(const Closing& closing, Open& open, bool everybody) const {
    const Policy& policy = job_->policy;
    if (closing.groups.empty()) {
      const bool full = open.full != 0 || IsFullRound(policy, open.round);
      Require(
          !policy.grouped() || open.round == 0 || (full && (everybody || closing.reason != Closing::Reason::kQuorum)),
          "a round has no groups");
      return;
    }
    Require(policy.grouped() && open.round > 0, "a round has groups");
    if (IsFlush(closing)) {
      for (const int group : closing.groups) Require(group == kNoGroup, "a flush has groups");
    } else if (policy.rule != Policy::Rule::kReady) {
      Require(closing.groups == GroupsOf(policy.schedule, open.round, size_), "the groups are not the schedule's");
    } else {
      for (const Members& group : GroupsOf(closing.groups)) {
        int bits = 0;
        for (const Rank rank : group) bits |= 1 << rank;
        Require((bits & ~open.arrived) == 0, "a group has ranks that are not ready");
        Require(Count(bits) <= SizeOfGroup(), "a group is too large");
        Require(Count(bits) == SizeOfGroup() || closing.reason == Closing::Reason::kLiveness, "a group is too small");
        open.groups.push_back(bits);
      }
    }
  }

  // The next rank's turn, once this one has come through the rounds; false after the last.
  bool Advance() {
    if (++next_ < running_.size()) return true;
    next_ = 0;
    while (++turn_ < size_)
      if (!ranks_[Index(turn_)].joined) return true;
    turn_ = 0;
    return false;
  }
  void SkipJoined() {
    while (ranks_[Index(turn_)].joined) ++turn_;
  }

  void BeginNext() {
    RankState& rank = ranks_[Index(turn_)];
    Running& running = running_[next_];
    if (running.closing->flushes && running.closing->Includes(turn_)) {
      ++rank.flush_rounds;
      if (job_->family) rank.flush_end[Index(running.bucket)] = running.closing->round + 1;
    }
    if (running.closing->flush_over != Report::Flush::kNone) {
      rank.level = Report::Flush::kNone;
      rank.over = running.closing->flush_over;
    }
    if (running.closing->Includes(turn_)) {
      bool slipped = false;
      running.inputs[Index(turn_)] = Change(rank, running.bucket).Begin(running.closing, turn_, slipped);
      coverage_->slipped += slipped ? 1 : 0;
      const bool late = !running.closing->contributions[Index(turn_)].fresh;
      const Sum sent = late && job_->bug == Bug::kPendingIsForgotten ? 0 : running.inputs[Index(turn_)];
      Require(sent == running.due[Index(turn_)], "a round's result is not the sum of what was due");
    } else {
      Change(rank, running.bucket).LeaveOut(running.closing, turn_);
      coverage_->left_out += IsFlush(*running.closing) ? 0 : 1;
    }
    if (next_ + 1 == running_.size()) EndFlush(rank);
    if (Advance()) return;
    phase_ = Phase::kFinish;
    SkipJoined();
  }

  void FinishNext(bool postpones) {
    const Running& running = running_[next_];
    const Ending ending{running.inputs[Index(turn_)], running.Result(turn_), running.closing->flushes};
    if (!running.closing->Includes(turn_)) {
      // has no part in it
    } else if (postpones) {
      ++coverage_->late_ends;
      ranks_[Index(turn_)].postponed[Index(running.bucket)] = std::make_shared<const Ending>(ending);
    } else {
      End(turn_, running.bucket, ending);
    }
    if (Advance()) return;
    phase_ = Phase::kReport;
    running_.clear();
    if (!abandoned_) return;
    for (RankState& rank : ranks_) {  // Horovod ends everything else
      for (int t = 0; t < static_cast<int>(ProcessOf(rank).size()); ++t)
        rank.threads[Index(t)] = {static_cast<std::uint8_t>(ProgramOf(rank, t).size())};
    }
  }

  void EndPostponed(Rank r) {
    for (int b = 0; b < job_->buckets; ++b) {
      const auto ending = std::exchange(ranks_[Index(r)].postponed[Index(b)], nullptr);
      if (ending != nullptr) End(r, b, *ending);
    }
  }

  void End(Rank r, int bucket, const Ending& ending) {
    RankState& rank = ranks_[Index(r)];
    Replica& replica = Change(rank, bucket);
    const bool left_out = replica.model.left_out;
    replica.Finish(r, ending.input, ending.due);
    if (left_out) rank.taken = std::max(rank.taken, replica.bucket().taken());
    rank.news = rank.news || replica.bucket().HasUnannounced();
    rank.flush_rounds = static_cast<std::uint8_t>(rank.flush_rounds - (ending.flushes ? 1 : 0));
    EndFlush(rank);
    if (replica.model.outstanding) return;
    for (int t = 0; t < ThreadsOf(r); ++t) {
      Thread& thread = rank.threads[Index(t)];
      if (!thread.waits) continue;
      const bool delivers = job_->family && OpOf(rank, t)->kind == Op::Kind::kDeliver;  // and waits for several
      if (AwaitedBy(rank, t) != bucket && !delivers) continue;
      if (IsFlush(*OpOf(rank, t))) {
        thread.waits = false;
        ++thread.drained;
      } else {
        FallAsleep(rank, t);
      }
    }
  }

  // If all its rounds have ended on this rank.
  void EndFlush(RankState& rank) {
    if (rank.flush_rounds > 0 || rank.over == Report::Flush::kNone) return;
    const Report::Flush over = std::exchange(rank.over, Report::Flush::kNone);
    rank.flush = over == Report::Flush::kEnding ? Flush::kAllEnded : Flush::kDelivered;
  }

  const Job* job_;
  Coverage* coverage_;
  std::shared_ptr<Attendance> attendance_;
  int size_;
  std::shared_ptr<const Policy> policy_;  // as the coordinator knows it
  int undecided_ = 0;                     // kAuto: buckets whose rounds have opened, and have no quorum yet
  std::shared_ptr<const Coordinator> coordinator_;
  std::vector<RankState> ranks_;
  std::array<Open, kMostBuckets> open_;
  Time now_{0};
  Time stuck_since_ = kNever;    // since when all ranks have ended, or are blocked
  Time waiting_since_ = kNever;  // since when all ranks have waited, each as a whole
  bool abandoned_ = false;       // ended ranks have left
  Phase phase_ = Phase::kReport;
  Rank turn_ = 0;
  std::size_t next_ = 0;  // of running_: the one to begin or to finish
  std::vector<Running> running_;
};

}  // namespace horovod_partial::test
