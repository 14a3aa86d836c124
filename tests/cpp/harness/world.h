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
// The world knows what should happen, independent of the code under test: harness/replica.h in sums and counts, and
// harness/rules.h for what the coordinator decides. It throws Violation where the real objects differ.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
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
#include "harness/rules.h"

namespace horovod_partial::test {

// What may happen next: a step of a thread of the rank whose turn it is, or the next background step.
struct Move {
  bool application = false;
  int thread = 0;          // that takes the step
  int says = 0;            // in its report: the number of an answer of Attendance
  bool later = false;      // and the coordinator decides when time has passed
  bool postpones = false;  // the round does not end on this rank yet
  bool ends = false;       // rounds that were postponed end on this rank
};

class World : private Rules {
 public:
  World(const Job& job, Coverage& coverage)
      : Rules(job, coverage), attendance_(std::make_shared<Attendance>(job.processes)) {
    const Policy& policy = job.policy;
    auto coordinator = std::make_shared<Coordinator>(size_);
    coordinator->SetDeadlockAfter(Coordinator::kDeadlockAfter);
    coordinator_ = std::move(coordinator);
    Handling handling;
    if (policy.grouped()) handling.missed = Missed::kLatest;
    if (policy.rule == Policy::Rule::kReady) handling.late = Late::kDiscard;
    if (KeepsModels()) handling.late = Late::kKeep;
    if (job.family) handling.missed = Missed::kReplay;
    handling.replay_limit = job.replay_limit;
    for (auto& rank : ranks_) {
      while (job.processes[Index(rank.twin)] != ProcessOf(rank)) ++rank.twin;
      for (int b = 0; b < job.buckets; ++b) rank.replicas[Index(b)] = std::make_shared<Replica>(b, handling);
    }
  }

  bool AtStartOfCycle() const { return phase_ == Phase::kReport && turn_ == 0; }
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

  // Where no application can move, there is another cycle, and it changes something. What has changed (a round is
  // closed, an arrival is known) does not change back, so a job that always takes such a step comes to its end.
  void CheckProgress() const {
    World world = *this;
    for (Rank r = 0; r < size_; ++r) world.EndPostponed(r);
    if (!world.Stuck()) return;
    Require(world.WantsCycle(), "deadlock: nobody asks for another cycle");
    const std::string before = world.Key();
    do world.Apply(world.Patient());
    while (!world.AtStartOfCycle());
    Require(world.Key() != before, "deadlock");
  }

  std::string Describe(Move move) const {
    static const char* const phases[] = {"reports", "begins", "finishes"};
    std::string text = "rank " + std::to_string(turn_) + " ";
    if (move.application) {
      const Thread& thread = ranks_[Index(turn_)].threads[Index(move.thread)];
      return text + "steps (thread " + std::to_string(move.thread) + ", op " + std::to_string(thread.at) + ")";
    }
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
    move.later = TimeMayPass();
    return move;
  }

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

  // --- Where a rank can come

  // All that it may say now; at last what it would say if everything that lasts had lasted for long.
  std::vector<int> MaySay(Rank r) const {
    const RankState& rank = ranks_[Index(r)];
    using Does = Attending::Thread::Does;
    Attending question;
    std::vector<std::size_t> choices;  // threads whose waits may have lasted for long or not
    bool anybody = false;
    for (int b = 0; b < job_->buckets; ++b) question.open |= (IsOpen(rank, b) ? 1 : 0) << b;
    for (int t = 0; t < ThreadsOf(r); ++t) {
      Attending::Thread& thread = question.threads[Index(t)];
      thread.at = rank.threads[Index(t)].at;
      const Op* op = OpOf(rank, t);
      if (rank.threads[Index(t)].waits) {
        thread.does = Does::kWait;
        thread.bucket = static_cast<std::uint8_t>(AwaitedBy(rank, t));
        if (IsOpen(rank, thread.bucket)) choices.push_back(Index(t));
      } else if (IsParked(rank, t)) {
        thread.does = Does::kPark;
        choices.push_back(Index(t));
      } else if (op != nullptr && IsFlush(*op) && rank.level != Report::Flush::kNone) {
        thread.does = op->kind == Op::Kind::kEnd ? Does::kEnd : Does::kFlush;
      } else {
        continue;
      }
      anybody = true;
    }
    std::vector<int> answers;
    if (!anybody) return {0};
    const auto add = [&] {
      const int answer = attendance_->Ask(r, question);
      answers.erase(std::remove(answers.begin(), answers.end(), answer), answers.end());
      answers.push_back(answer);
    };
    for (std::size_t chosen = 0; chosen < std::size_t{1} << choices.size(); ++chosen) {
      for (std::size_t i = 0; i < choices.size(); ++i)
        question.threads[choices[i]].long_enough = (chosen >> i & 1) != 0;
      add();
    }
    const bool runs = std::any_of(ranks_.begin(), ranks_.end(), Postponed);
    if (job_->silence && !runs && Stuck()) {
      question.silent = true;
      add();
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
      } else if (bucket.state() == Bucket::State::kArrived && rank.joined) {
        continue;  // it counts when the join is over
      } else if (bucket.state() == Bucket::State::kArrived && !bucket.reported()) {
        open_[Index(b)].full |= rank.replicas[Index(b)]->model.wants_full << turn_;
        coverage_->full_requests += rank.replicas[Index(b)]->model.wants_full ? 1 : 0;
        rank.sent = static_cast<std::uint8_t>(rank.sent | 1 << b);
        item.gradients = Change(rank, b).ReportArrival();
        item.full = rank.replicas[Index(b)]->bucket().wants_full_round();
        if (!rank.replicas[Index(b)]->bucket().declared()) item.declaration = Declaration{job_->policy};
      } else {
        item.kind = Report::Item::Kind::kPending;
        item.gradients = Change(rank, b).ReportPending();
        item.late = rank.replicas[Index(b)]->bucket().ReportLate();
        if (job_->family && rank.replicas[Index(b)]->model.untaken.size() >= Index(job_->replay_limit)) {
          rank.full |= 1 << b;
          item.backlog = rank.drains ? Report::Backlog::kDraining : Report::Backlog::kFull;
        }
        if (item.gradients == 0 && item.backlog == Report::Backlog::kNone) continue;
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
    coordinator->SetJoined(joined);
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

  // --- The clock

  // And it makes a difference.
  bool TimeMayPass() const {
    return job_->clock && phase_ == Phase::kReport && turn_ + 1 == size_ &&
           (stuck_since_ == now_ || waiting_since_ == now_ ||
            std::any_of(open_.begin(), open_.end(), [&](const Open& open) { return open.quorate == now_; }));
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
      Require(running.inputs[Index(turn_)] == running.due[Index(turn_)],
              "a round's result is not the sum of what was due");
    } else {
      Change(rank, running.bucket).LeaveOut(running.closing, turn_);
      coverage_->left_out += IsOfAFlush(*running.closing) ? 0 : 1;
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

  std::shared_ptr<Attendance> attendance_;
  std::shared_ptr<const Coordinator> coordinator_;
};

}  // namespace horovod_partial::test
