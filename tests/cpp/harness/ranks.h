// The ranks of a simulated job, and what their applications do.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/quorum/policy.h"
#include "core/rounds/bucket.h"
#include "core/rounds/coordinator.h"
#include "core/rounds/message.h"
#include "harness/attendance.h"
#include "harness/explorer.h"
#include "harness/program.h"
#include "harness/replica.h"

namespace horovod_partial::test {

inline constexpr Round kForEver = 1 << 20;

struct Job {
  Policy policy;
  std::vector<Process> processes;  // by rank
  bool late_ends = false;          // a round may end on a rank cycles after it has ended on others, as on a device
  bool clock = false;              // time may pass: kLong at once
  bool silence = false;            // where nobody moves and nothing runs, it lasts long enough for rule 7's fallback
  bool queues = false;             // threads hand buckets over or wait for each other by queues: rule 7 may be wrong
  int buckets = 2;
  bool family = false;  // the buckets are one: results are taken as whole rounds
  int replay_limit = 2;
  bool never_sums = false;  // no rank has to add rounds up
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
  std::size_t held = 0;               // cycles in which a quorum waited for a rank with too many untaken results
  std::size_t drained = 0;            // rounds taken in the middle of a flush
  std::size_t taken_meanwhile = 0;    // and in that of a collective that is not ours
  std::size_t kept = 0;               // flushes after which a round that came behind them was left
  std::size_t summed = 0;             // takings of several rounds as one
};

// The state of a job, and the steps of its applications.
class Ranks {
 protected:
  Ranks(const Job& job, Coverage& coverage)
      : job_(&job), coverage_(&coverage), size_(static_cast<int>(job.processes.size())), ranks_(job.processes.size()) {}

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

  bool KeepsModels() const { return job_->policy.schedule.kind != Schedule::Kind::kNone; }

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
      if (bucket.untaken() < rounds || bucket.taken() + rounds > rank.flush_end[Index(b)]) return 0;
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
    return job_->family && op != nullptr && op->kind == Op::Kind::kForeign;
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
    for (int b = 0; b < job_->buckets; ++b)
      if (rank.replicas[Index(b)]->bucket().completed() == open) Arrive(rank, b, 0);
  }
  void LeaveOut(Rank r, int bucket, Round completed) {
    if (!job_->family) return;
    RankState& rank = ranks_[Index(r)];
    Replica& replica = Change(rank, bucket);
    replica.LeaveOut(completed);
    rank.taken = std::max(rank.taken, replica.bucket().taken());
    if (!replica.bucket().declared() && completed > 0 && !replica.model.outstanding) Arrive(rank, bucket, 0);
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
        const bool had_joined = thread.at > 2 && ProgramOf(rank, t)[thread.at - 3u].kind == Op::Kind::kJoin;
        Require(end != kForEver || !had_joined, "a flush after a join leaves out a rank");
        Require(end == kForEver || rank.taken == end, "a rank leaves a flush with other rounds");
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

  // A rank whose round has not ended says so, and has sent nothing else of that bucket.
  bool Runs(int bucket) const {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [&](const RankState& rank) { return rank.postponed[Index(bucket)] != nullptr; });
  }
  static bool Postponed(const RankState& rank) {
    return std::any_of(rank.postponed.begin(), rank.postponed.end(), [](const auto& each) { return each != nullptr; });
  }

  const Job* job_;
  Coverage* coverage_;
  int size_;
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
