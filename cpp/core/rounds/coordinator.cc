#include "core/rounds/coordinator.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace horovod_partial {
namespace {

// The shortest lag from which grace is learned. A rank may arrive before the policy is satisfied and still be late,
// because its report was on the way. With any grace above zero a round waits one more cycle for such a rank.
constexpr Time kSmallestLag{1};

// At round 0 ranks make communicators for the groups of at most this many later rounds, and make others when needed.
constexpr Round kUpcoming = 64;

}  // namespace

Coordinator::Coordinator(int size) : size_(size), levels_(Index(size)) {}

BucketState& Coordinator::Find(const std::string& name) {
  BucketState& bucket = buckets_[name];
  if (bucket.ranks.empty()) {
    for (const RankLevel& level : levels_) {
      BucketState::RankState& rank = bucket.ranks.emplace_back();
      rank.joined = level.joined;
      rank.said.absent = level.absent;
      rank.said.waiting = level.waiting;
    }
  }
  return bucket;
}

int Coordinator::device(const std::string& name, Rank rank) const {
  const BucketState& bucket = buckets_.at(name);
  return bucket.At(rank).device.value_or(bucket.declaration->device);
}

void Coordinator::SetJoined(const std::vector<bool>& joined) {
  for (Rank rank = 0; rank < size_; ++rank) {
    const bool was = std::exchange(levels_[Index(rank)].joined, joined[Index(rank)]);
    if (!joined[Index(rank)] && !was) continue;
    for (auto& [name, bucket] : buckets_) {
      bucket.At(rank).joined = joined[Index(rank)];
      if (!joined[Index(rank)]) continue;
      bucket.At(rank).arrival.reset();
      bucket.declared.erase(rank);
      bucket.FindFirstArrival();
      if (!bucket.HasArrival()) bucket.satisfied = kNever;
    }
  }
}

void Coordinator::Observe(Rank rank, const Report& report, Time now) {
  Check(report, size_);
  ForgetEnded();
  RankLevel& level = levels_[Index(rank)];
  level = {report.absent.all, report.waiting.all, report.blocked, report.leaves,
           report.elsewhere,  report.flush,       level.joined};
  for (auto& [name, bucket] : buckets_) {
    BucketState::Said& said = bucket.At(rank).said;
    said = {};
    said.absent = report.absent.Has(name);
    said.waiting = report.waiting.Has(name);
  }
  for (const auto& item : report.items) {
    BucketState& bucket = Find(item.bucket);
    BucketState::RankState& state = bucket.At(rank);
    const Time arrived = now - item.age;
    if (item.kind == Report::Item::Kind::kRunning) {
      state.said.running = true;
      continue;
    }
    if (item.kind == Report::Item::Kind::kRetired) {
      state.said.retired = true;
      state.said.absent = true;
    }
    if (item.kind != Report::Item::Kind::kArrival) {
      state.said.backlog = item.backlog;
      state.said.pending = item.gradients;
      state.said.late = item.late;
      if (item.late > state.late_seen && bucket.last_first_arrival != kNever) {
        state.RecordOffset(arrived - bucket.last_first_arrival);
        bucket.grace.RecordLag(std::max(arrived - bucket.last_satisfied, kSmallestLag));
      }
      state.late_seen = std::max(state.late_seen, item.late);
      continue;
    }
    const Time step = state.last_arrival == kNever ? Time(0) : arrived - state.last_arrival;
    state.last_arrival = arrived;
    state.arrival = {item.gradients, item.work, item.full, arrived, step};
    if (item.declaration) {
      bucket.declared[rank] = *item.declaration;
      state.device = item.declaration->device;
    }
    // Under work sharing the wait for an update counts from the end of the micro-batch that was made last.
    bucket.first_arrival = bucket.SharesWork() ? arrived : std::min(bucket.first_arrival, arrived);
    if (bucket.satisfied != kNever) bucket.grace.RecordLag(std::max(arrived - bucket.satisfied, kSmallestLag));
  }
  for (const auto& item : report.items) {
    BucketState& bucket = buckets_.at(item.bucket);
    if (item.share && bucket.ledger)
      bucket.ledger->Observe(rank, *item.share, bucket.At(rank).arrived_gradients(), now);
  }
}

// Returns true if no missing rank will arrive at round 0, which waits for every rank. A rank will not arrive if it has
// joined. It will not arrive either if it is away from this bucket (rule 7), and flushes or has ended.
bool Coordinator::NobodyWillDeclare(const BucketState& bucket) const {
  for (Rank rank = 0; rank < size_; ++rank) {
    const BucketState::RankState& state = bucket.At(rank);
    const bool flushes = levels_[Index(rank)].flush != Report::Flush::kNone && state.said.absent;
    if (!state.arrival && !state.joined && !flushes) return false;
  }
  return true;
}

bool Coordinator::NobodyComes() const {
  for (Rank rank = 0; rank < size_; ++rank)
    if (Comes(rank)) return false;
  return true;
}

// Under work sharing a round closes when its micro-batches are complete, or when no rank will begin another (rule 17).
std::optional<Closing::Reason> Coordinator::VerdictOnUpdate(const BucketState& bucket) const {
  if (!bucket.declaration && !bucket.EverybodyArrived()) return std::nullopt;
  if (bucket.declaration && bucket.TooStale()) return std::nullopt;
  int done = 0;
  for (const BucketState::RankState& rank : bucket.ranks) done += rank.arrived_gradients();
  if (!bucket.declaration) {  // the first update, in which each rank makes its own micro-batches
    const int each = bucket.Known()->policy.micro_batches / size_;
    bool complete = true;
    for (Rank rank = 0; rank < size_; ++rank)
      complete = complete && (!Comes(rank) || bucket.At(rank).arrived_gradients() >= each);
    if (complete || !bucket.Disagreement().empty()) return Closing::Reason::kFirst;
    return std::nullopt;
  }
  if (done >= bucket.policy().micro_batches) return Closing::Reason::kQuorum;
  if (NobodyComes()) return Closing::Reason::kLiveness;
  return std::nullopt;
}

std::optional<Closing::Reason> Coordinator::Verdict(const BucketState& bucket, Time now) const {
  if (!bucket.HasArrival()) return std::nullopt;
  if (bucket.SharesWork()) return VerdictOnUpdate(bucket);
  if (bucket.EverybodyArrived()) return bucket.declaration ? Closing::Reason::kEverybody : Closing::Reason::kFirst;
  if (!bucket.declaration || bucket.satisfied == kNever) return std::nullopt;
  if (now - bucket.satisfied >= bucket.Grace()) return Closing::Reason::kQuorum;
  return std::nullopt;
}

bool Coordinator::AnythingRuns() const {
  return std::any_of(buckets_.begin(), buckets_.end(), [](const auto& item) { return item.second.Running(); });
}

bool Coordinator::OnlyBlockedRanksAreLeft() const {
  if (AnythingRuns()) return false;
  bool anybody_ended = false;
  for (const RankLevel& level : levels_) {
    const bool ended = level.flush == Report::Flush::kEnding;
    anybody_ended = anybody_ended || ended;
    if (level.flush == Report::Flush::kFlushing) return false;
    if (!ended && !level.joined && !level.absent && !level.waiting) return false;
  }
  return anybody_ended;
}

// Returns true if every rank is blocked and no wait can end (docs/protocol.md, rule 12). The waits are for round 0 of a
// bucket that other ranks do not use, for a flush to which others do not come, or under work sharing for an update in
// which a blocked rank holds a micro-batch. A rank that takes results in a flush is at work, so it is not blocked.
bool Coordinator::RanksWaitForEachOther() const {
  if (deadlock_after_ == kNever || AnythingRuns()) return false;
  for (const RankLevel& level : levels_)
    if (!level.joined && !level.blocked) return false;
  for (const auto& [name, bucket] : buckets_)
    if (bucket.Draining()) return false;
  const auto elsewhere = [](const RankLevel& level) { return !level.elsewhere.empty(); };
  return flush_since_ != kNever || std::any_of(levels_.begin(), levels_.end(), elsewhere) ||
         std::any_of(buckets_.begin(), buckets_.end(), [](const auto& item) {
           const BucketState& bucket = item.second;
           return (!bucket.declaration || bucket.SharesWork()) && bucket.HasArrival();
         });
}

Report::Flush Coordinator::FlushOfAll() const {
  if (flush_since_ == kNever) return Report::Flush::kNone;  // in most cycles no rank is in a flush: return quickly
  bool everybody_ends = true;
  bool anybody_active = false;
  for (Rank rank = 0; rank < size_; ++rank) {
    if (levels_[Index(rank)].joined || !Uses(buckets_, rank)) continue;
    const Report::Flush flush = levels_[Index(rank)].flush;
    if (flush == Report::Flush::kNone) return flush;
    anybody_active = true;
    everybody_ends = everybody_ends && flush == Report::Flush::kEnding;
  }
  if (!anybody_active) return Report::Flush::kNone;
  return everybody_ends ? Report::Flush::kEnding : Report::Flush::kFlushing;
}

void Coordinator::BeginFlush(Report::Flush flush) {
  flush_ = flush;
  unflushed_.clear();
  for (const auto& [name, bucket] : buckets_)
    if (bucket.declaration && !IsOfFlushes(name)) unflushed_.insert(name);
}

void Coordinator::ForgetEnded() {
  for (const std::string& name : ended_) buckets_.erase(name);
  ended_.clear();
}

// Closes round 0. From now on the bucket has a declaration and a policy.
void Coordinator::Begin(BucketState& bucket, Closing& closing) {
  std::tie(bucket.declared_by, bucket.declaration) = *bucket.declared.begin();
  const Policy& policy = bucket.policy();
  if (policy.grants) bucket.ledger.emplace(size_, policy.micro_batches);
  if (policy.rule == Policy::Rule::kReady) bucket.ready_groups.emplace(size_, policy.group_size, policy.window);
  const Round upcoming = std::min(CycleOf(policy.schedule, size_), kUpcoming);
  for (Round round = 1; round <= upcoming; ++round) closing.upcoming.push_back(GroupsOf(policy.schedule, round, size_));
}

Closing Coordinator::Close(const std::string& name, BucketState& bucket, Closing::Reason reason, Partition groups,
                           Time now) {
  Closing closing;
  closing.bucket = name;
  closing.round = bucket.round;
  closing.reason = reason;
  closing.groups = std::move(groups);
  deadlocked_since_ = kNever;  // a closing round ends a wait, so not all ranks wait for each other
  closing.flushes = unflushed_.erase(name) > 0;
  if (closing.flushes && unflushed_.empty()) closing.flush_over = flush_;
  const bool flush = bucket.declaration && bucket.policy().grouped() && !bucket.HasArrival();
  for (Rank rank = 0; rank < size_; ++rank) {
    if (!closing.Includes(rank)) {
      closing.contributions.emplace_back();
      continue;
    }
    BucketState::RankState& state = bucket.At(rank);
    const Closing::Contribution contribution = bucket.ContributionOf(rank);
    // Only a contribution of something new counts as the rank's last one. A kept model that was in an earlier round
    // (`stale`) is not new. A contribution without gradients, which a rank may make in a flush, does not count either.
    if (contribution.gradients > 0 && !contribution.stale) state.last_contribution = bucket.round;
    closing.contributions.push_back(contribution);
    if (state.arrival) state.RecordOffset(state.arrival->time - bucket.first_arrival);
    state.arrival.reset();
    state.said.pending = 0;
    state.said.late = 0;
    state.late_seen = 0;
  }
  if (!bucket.declared.empty()) {
    closing.error = bucket.Disagreement();
    if (!bucket.declaration && reason == Closing::Reason::kLiveness) {
      closing.error =
          "No rank that is missing will ever use this bucket: they have ended, or wait in a flush. "
          "Use a new bucket on every rank, before any of them flushes or ends.";
    }
    if (!bucket.declaration) Begin(bucket, closing);
    bucket.declared.clear();
  }
  if (flush) return closing;  // in a flush, the Closing message of a bucket of models counts as no round
  if (bucket.closed != kNever) bucket.grace.RecordStep(now - bucket.closed);
  bucket.closed = now;
  bucket.last_first_arrival = bucket.first_arrival;
  bucket.last_satisfied = bucket.satisfied == kNever ? now : bucket.satisfied;
  bucket.FindFirstArrival();
  bucket.satisfied = kNever;
  ++bucket.round;
  if (bucket.ledger) bucket.ledger->Advance();
  return closing;
}

// Closes the last round of a bucket, to deliver all pending sums. If there are none, no rank takes part in the round.
Closing Coordinator::End(const std::string& name, BucketState& bucket, Time now) {
  const bool pending = bucket.Any([](const BucketState::RankState& rank) { return rank.said.pending > 0; });
  Closing closing = Close(name, bucket, Closing::Reason::kEnd, pending ? Partition() : PartitionOf({}, size_), now);
  closing.ends = true;
  ended_.push_back(name);
  return closing;
}

// Called when all ranks wait for each other. Makes all buckets in use, and all flushes, fail on all ranks.
std::vector<Closing> Coordinator::RefuseAll(Time now) {
  const std::string text = DescribeDeadlock(levels_, buckets_);
  deadlock_ = text;
  deadlocked_since_ = kNever;
  std::vector<Closing> closings;
  for (auto& [name, bucket] : buckets_) {
    if (!bucket.declaration && !bucket.HasArrival()) continue;
    closings.push_back(Close(name, bucket, Closing::Reason::kLiveness, {}, now));
    closings.back().error = text;
  }
  return closings;
}

std::vector<Closing> Coordinator::Decide(Time now) {
  ForgetEnded();
  deadlock_.clear();
  grants_.clear();
  const auto since = [now](bool state, Time before) { return state ? std::min(before, now) : kNever; };
  stuck_since_ = since(OnlyBlockedRanksAreLeft(), stuck_since_);
  const auto anyone = [this](const auto& flushes) {
    return std::any_of(levels_.begin(), levels_.end(), [&](const RankLevel& level) { return flushes(level.flush); });
  };
  flush_since_ = since(anyone([](Report::Flush flush) { return flush != Report::Flush::kNone; }), flush_since_);
  flushing_since_ =
      since(anyone([](Report::Flush flush) { return flush == Report::Flush::kFlushing; }), flushing_since_);
  deadlocked_since_ = since(RanksWaitForEachOther(), deadlocked_since_);
  again_ = flush_since_ != kNever && AnythingRuns();
  const Report::Flush flush = FlushOfAll();
  // A flush that one rank gives up ends for all ranks. The next flush begins anew.
  if (flush == Report::Flush::kNone) {
    unflushed_.clear();
  } else if (unflushed_.empty()) {
    BeginFlush(flush);
  }
  std::vector<Closing> closings;
  if (stuck_since_ != kNever && now - stuck_since_ >= kAbandonAfter) {
    BeginFlush(Report::Flush::kEnding);
    for (auto& [name, bucket] : buckets_)
      if (bucket.declaration) closings.push_back(Close(name, bucket, Closing::Reason::kEnd, now));
    stuck_since_ = kNever;
    if (!closings.empty()) return closings;
  }
  if (deadlocked_since_ != kNever && now - deadlocked_since_ >= deadlock_after_) return RefuseAll(now);
  for (auto& [name, bucket] : buckets_) {
    const bool ready_groups = bucket.ready_groups && !bucket.WantsEverybody();
    if (ready_groups && bucket.HasArrival() && !bucket.Running()) {
      Partition groups = bucket.FormGroups(now);
      if (!groups.empty()) closings.push_back(Close(name, bucket, Closing::Reason::kQuorum, std::move(groups), now));
    }
    if (ready_groups) {
      again_ = again_ || (bucket.Running() && bucket.HasArrival());
      continue;
    }
    if (bucket.declaration && bucket.HasArrival() && !bucket.SharesWork()) {
      if (!bucket.Satisfied()) {
        bucket.satisfied = kNever;  // the policy is no longer satisfied, for example because a rank trains again
      } else if (bucket.satisfied == kNever) {
        bucket.satisfied = now;
      }
    }
    if (bucket.Running()) {
      again_ = again_ || bucket.HasArrival();
      continue;
    }
    if (bucket.Draining()) continue;
    if (const auto reason = Verdict(bucket, now)) closings.push_back(Close(name, bucket, *reason, now));
  }
  const bool closed = !closings.empty();
  // Buckets with too many untaken results on some rank come last, because that rank would have to add results up.
  for (const bool full : {false, true}) {
    for (auto& [name, bucket] : buckets_) {
      if (!bucket.HasArrival() || bucket.Running() || bucket.Draining() || bucket.Full() != full) continue;
      // Under work sharing a rank that has arrived and waits may begin another micro-batch, so the round stays open.
      if (bucket.SharesWork() && (bucket.declaration || bucket.EverybodyArrived())) continue;
      if (!(bucket.declaration ? bucket.NobodyCanCome() : NobodyWillDeclare(bucket))) continue;
      if (!closings.empty()) {
        again_ = true;  // a cycle closes at most one round by liveness, and none if any other round has closed
      } else {
        closings.push_back(Close(name, bucket, Closing::Reason::kLiveness, now));
      }
    }
  }
  again_ = again_ || (!closings.empty() && !closed);
  for (auto& [name, bucket] : buckets_) {
    const bool retired = bucket.Any([](const BucketState::RankState& rank) { return rank.said.retired; });
    const bool of_optimizer = !IsOfFlushes(name);
    bucket.retired_since = since(of_optimizer && retired, bucket.retired_since);
    if (!of_optimizer || !bucket.Ends()) continue;
    if (bucket.Running()) {
      again_ = true;
    } else {
      closings.push_back(End(name, bucket, now));
    }
  }
  // A flush closes no round at which a rank has arrived, because a thread that does not flush may wait in that round.
  // That round closes later, for another reason. Then the flush needs no other round of the bucket.
  for (const std::string& name : std::set<std::string>(unflushed_)) {
    BucketState& bucket = buckets_.at(name);
    if (bucket.HasArrival() || bucket.Running() || bucket.Draining()) continue;
    // A flush waits while another thread of some rank may be in the middle of a micro-batch.
    if (bucket.SharesWork() && !NobodyComes()) continue;
    const auto reason = flush == Report::Flush::kEnding ? Closing::Reason::kEnd : Closing::Reason::kFlush;
    closings.push_back(Close(name, bucket, reason, now));
  }
  again_ = again_ || (!unflushed_.empty() && !closings.empty());
  Grant(now);
  return closings;
}

void Coordinator::Grant(Time now) {
  for (auto& [name, bucket] : buckets_) {
    if (!bucket.ledger) continue;
    std::vector<bool> comes;
    for (Rank rank = 0; rank < size_; ++rank) comes.push_back(Comes(rank));
    std::vector<MicroBatches> granted = bucket.ledger->Decide(comes, now);
    if (!granted.empty()) grants_.push_back({name, std::move(granted)});
  }
}

Time Coordinator::NextDeadline() const {
  if (again_) return Time::min();
  Time earliest = stuck_since_ == kNever ? kNever : stuck_since_ + kAbandonAfter;
  if (deadlocked_since_ != kNever) earliest = std::min(earliest, deadlocked_since_ + deadlock_after_);
  for (const auto& [name, bucket] : buckets_) {
    if (bucket.ledger) earliest = std::min(earliest, bucket.ledger->NextDeadline());
    if (bucket.declaration && bucket.satisfied != kNever)
      earliest = std::min(earliest, bucket.satisfied + bucket.Grace());
    if (bucket.ready_groups && bucket.HasArrival() && !bucket.WantsEverybody())
      earliest = std::min(earliest, bucket.ready_groups->hold_until());
  }
  return earliest;
}

Time Coordinator::OldestWait() const {
  Time oldest = flushing_since_;
  for (const auto& [name, bucket] : buckets_)
    if (bucket.HasArrival()) oldest = std::min(oldest, bucket.first_arrival);
  return oldest;
}

std::map<std::string, Coordinator::Counts> Coordinator::Counted() const {
  std::map<std::string, Counts> counted;
  for (const auto& [name, bucket] : buckets_) {
    Counts& counts = counted[name];
    for (const BucketState::RankState& rank : bucket.ranks)
      counts.offsets.push_back(rank.arrivals > 0 ? rank.offset_seconds / static_cast<double>(rank.arrivals) : 0);
    if (bucket.ready_groups) counts.unconnected = bucket.ready_groups->unconnected();
  }
  return counted;
}

}  // namespace horovod_partial
