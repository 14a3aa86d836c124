#include "core/coordinator.h"

#include <algorithm>
#include <sstream>
#include <tuple>

namespace horovod_partial {
namespace {

// A rank may arrive before its round is satisfied and still miss it, because its report was on the way. It needs only
// one more cycle, and any grace above zero gives it that.
constexpr Time kSmallestLag{1};

// Round 0 announces this many partitions of its schedule at most. More are not worth the message: a communicator that
// is not announced is made when it is needed.
constexpr Round kUpcoming = 64;

}  // namespace

Coordinator::Coordinator(int size) : size_(size), joined_(Index(size), false), levels_(Index(size)) {}

bool Coordinator::Bucket::HasArrival() const {
  return std::any_of(arrivals.begin(), arrivals.end(), [](const Arrival& arrival) { return arrival.present; });
}

void Coordinator::Bucket::FindFirstArrival() {
  first_arrival = kNever;
  for (const Arrival& arrival : arrivals)
    if (arrival.present) first_arrival = std::min(first_arrival, arrival.time);
}

// True if a rank has asked for a full round, or the policy makes this round a full one.
bool Coordinator::Bucket::WantsEverybody() const {
  return (declaration && IsFullRound(policy(), round)) ||
         std::any_of(arrivals.begin(), arrivals.end(), [](const Arrival& arrival) { return arrival.full; });
}

// True if the last round has not ended on some rank. The next one waits for it, because a bucket has one set of buffers
// on each rank.
bool Coordinator::Bucket::Running() const { return std::find(running.begin(), running.end(), true) != running.end(); }

// True if some rank has as many untaken results as it may, but takes them now, in a flush or another wait.
bool Coordinator::Bucket::Draining() const {
  return std::find(backlog.begin(), backlog.end(), Report::Backlog::kDraining) != backlog.end();
}

// True if some rank has as many untaken results as it may.
bool Coordinator::Bucket::Full() const {
  return std::any_of(backlog.begin(), backlog.end(),
                     [](Report::Backlog each) { return each != Report::Backlog::kNone; });
}

// Before the ranks have agreed on a policy, the first declaration counts.
bool Coordinator::Bucket::SharesWork() const {
  if (declaration) return policy().rule == Policy::Rule::kWorkSharing;
  return !declared.empty() && declared.begin()->second.policy.rule == Policy::Rule::kWorkSharing;
}

std::string Coordinator::Bucket::Title(const std::string& name) const {
  if (declaration) return TitleOf(name, declaration->members);
  return declared.empty() ? name : TitleOf(name, declared.begin()->second.members);
}

Time Coordinator::Bucket::Grace() const {
  return policy().grace == Policy::kAutomaticGrace ? grace.Estimate() : policy().grace;
}

Coordinator::Bucket& Coordinator::Find(const std::string& name) {
  Bucket& bucket = buckets_[name];
  if (bucket.arrivals.empty()) {
    bucket.arrivals.resize(Index(size_));
    bucket.pending.resize(Index(size_));
    bucket.running.resize(Index(size_));
    bucket.retired.resize(Index(size_));
    bucket.backlog.resize(Index(size_));
    bucket.late.resize(Index(size_));
    bucket.late_seen.resize(Index(size_));
    for (const RankLevel& level : levels_) {
      bucket.absent.push_back(level.absent);
      bucket.waiting.push_back(level.waiting);
    }
    bucket.last_contribution.resize(Index(size_), -1);
    bucket.last_arrival.resize(Index(size_), kNever);
    bucket.offsets.total_seconds.resize(Index(size_));
    bucket.offsets.count.resize(Index(size_));
  }
  return bucket;
}

int Coordinator::device(const std::string& name, Rank rank) const {
  const Bucket& bucket = buckets_.at(name);
  const auto it = bucket.devices.find(rank);
  return it == bucket.devices.end() ? bucket.declaration->device : it->second;
}

void Coordinator::SetJoined(std::vector<bool> joined) {
  joined_ = std::move(joined);
  for (Rank rank = 0; rank < size_; ++rank) {
    if (!joined_[Index(rank)]) continue;
    for (auto& [name, bucket] : buckets_) {
      bucket.arrivals[Index(rank)] = {};
      bucket.declared.erase(rank);
      bucket.FindFirstArrival();
      if (!bucket.HasArrival()) bucket.satisfied = kNever;
    }
  }
}

void Coordinator::RecordOffset(Bucket& bucket, Rank rank, Time offset) {
  // Never negative: a late arrival may have come before the first one of the round that closed in between.
  bucket.offsets.total_seconds[Index(rank)] += std::chrono::duration<double>(std::max(offset, Time(0))).count();
  ++bucket.offsets.count[Index(rank)];
}

void Coordinator::Observe(Rank rank, const Report& report, Time now) {
  Check(report, size_);
  ForgetEnded();
  levels_[Index(rank)] = {report.absent.all, report.waiting.all, report.blocked,
                          report.leaves,     report.elsewhere,   report.flush};
  for (auto& [name, bucket] : buckets_) {
    bucket.pending[Index(rank)] = 0;
    bucket.late[Index(rank)] = 0;
    bucket.running[Index(rank)] = false;
    bucket.retired[Index(rank)] = false;
    bucket.backlog[Index(rank)] = Report::Backlog::kNone;
    bucket.absent[Index(rank)] = report.absent.Has(name);
    bucket.waiting[Index(rank)] = report.waiting.Has(name);
    AutoQuorum* const quorum = bucket.absent[Index(rank)] ? PaceSetBy(name, bucket) : nullptr;
    if (quorum != nullptr) quorum->Leave(rank);
  }
  for (const auto& item : report.items) {
    Bucket& bucket = Find(item.bucket);
    AutoQuorum* const quorum = PaceSetBy(item.bucket, bucket);
    const Time arrived = now - item.age;
    if (item.kind == Report::Item::Kind::kRunning) {
      bucket.running[Index(rank)] = true;
      continue;
    }
    if (item.kind == Report::Item::Kind::kRetired) {
      bucket.retired[Index(rank)] = true;
      bucket.absent[Index(rank)] = true;
      if (quorum != nullptr) quorum->Leave(rank);
    }
    if (item.kind != Report::Item::Kind::kArrival) {
      bucket.backlog[Index(rank)] = item.backlog;
      bucket.pending[Index(rank)] = item.gradients;
      bucket.late[Index(rank)] = item.late;
      int& seen = bucket.late_seen[Index(rank)];
      if (item.late > seen && bucket.last_first_arrival != kNever) {
        RecordOffset(bucket, rank, arrived - bucket.last_first_arrival);
        bucket.grace.RecordLag(std::max(arrived - bucket.last_satisfied, kSmallestLag));
      }
      if (quorum != nullptr && item.late > seen) quorum->Arrive(rank, arrived, item.late - seen, true);
      seen = std::max(seen, item.late);
      continue;
    }
    Time& last = bucket.last_arrival[Index(rank)];
    const Time step = last == kNever ? Time(0) : arrived - last;
    last = arrived;
    bucket.arrivals[Index(rank)] = {item.gradients, item.work, true, item.full, arrived, step};
    if (item.declaration) {
      bucket.declared[rank] = *item.declaration;
      bucket.devices[rank] = item.declaration->device;
    }
    // If work is shared, the wait for an update begins with the micro-batch that was made last.
    bucket.first_arrival = bucket.SharesWork() ? arrived : std::min(bucket.first_arrival, arrived);
    if (bucket.satisfied != kNever) bucket.grace.RecordLag(std::max(arrived - bucket.satisfied, kSmallestLag));
    if (quorum != nullptr) quorum->Arrive(rank, arrived, 1, false);
  }
  if (ledgers_.empty()) return;
  for (const auto& item : report.items) {
    const auto ledger = item.share ? ledgers_.find(item.bucket) : ledgers_.end();
    if (ledger == ledgers_.end()) continue;
    const int done = buckets_.at(item.bucket).arrivals[Index(rank)].gradients;
    ledger->second.Observe(rank, *item.share, done, now);
  }
}

bool Coordinator::EverybodyArrived(const Bucket& bucket) const {
  for (Rank rank = 0; rank < size_; ++rank)
    if (!joined_[Index(rank)] && !bucket.arrivals[Index(rank)].present) return false;
  return true;
}

// Rule 6: some rank that is missing has missed too many rounds, or has too many untaken results.
bool Coordinator::TooStale(const Bucket& bucket) const {
  for (Rank rank = 0; rank < size_; ++rank)
    if (MustWaitFor(bucket, rank)) return true;
  return false;
}

// A rank with a late arrival counts as contributing, because its contribution is about to be delivered. If it has as
// many untaken results as it may, rounds wait for it all the same.
bool Coordinator::MustWaitFor(const Bucket& bucket, Rank rank) const {
  if (bucket.arrivals[Index(rank)].present || Absent(bucket, rank)) return false;
  if (bucket.backlog[Index(rank)] != Report::Backlog::kNone) return true;
  return bucket.late[Index(rank)] == 0 &&
         bucket.round - bucket.last_contribution[Index(rank)] > bucket.policy().max_staleness;
}

bool Coordinator::Satisfied(const Bucket& bucket) const {
  if (bucket.WantsEverybody() || TooStale(bucket)) return false;
  if (bucket.policy().rule == Policy::Rule::kInitiator) {
    Rank rank = Initiator(bucket.policy(), bucket.round, size_);
    for (int tries = 0; tries < size_ && joined_[Index(rank)]; ++tries) rank = (rank + 1) % size_;
    return bucket.arrivals[Index(rank)].present;
  }
  int arrived = 0;
  int active = 0;
  for (Rank rank = 0; rank < size_; ++rank) {
    arrived += bucket.arrivals[Index(rank)].present ? 1 : 0;
    active += joined_[Index(rank)] ? 0 : 1;
  }
  return arrived >= std::min(bucket.quorum, active);
}

// Rule 7: no rank that is missing can come.
bool Coordinator::NobodyCanCome(const Bucket& bucket) const {
  for (Rank rank = 0; rank < size_; ++rank)
    if (!bucket.arrivals[Index(rank)].present && !CannotCome(bucket, rank)) return false;
  return true;
}

// Round 0 waits for every rank. A rank will not come if it has joined, or is in a flush or has ended and is out of
// training for the bucket.
bool Coordinator::NobodyWillDeclare(const Bucket& bucket) const {
  for (Rank rank = 0; rank < size_; ++rank) {
    const bool flushes = levels_[Index(rank)].flush != Report::Flush::kNone && bucket.absent[Index(rank)];
    const bool gone = joined_[Index(rank)] || flushes;
    if (!bucket.arrivals[Index(rank)].present && !gone) return false;
  }
  return true;
}

bool Coordinator::NobodyComes() const {
  for (Rank rank = 0; rank < size_; ++rank)
    if (Comes(rank)) return false;
  return true;
}

// Rule 17: an update closes when all micro-batches are in the sum, or when no rank will begin another one.
std::optional<Closing::Reason> Coordinator::VerdictOnUpdate(const Bucket& bucket) const {
  if (!bucket.declaration && !EverybodyArrived(bucket)) return std::nullopt;
  if (bucket.declaration && TooStale(bucket)) return std::nullopt;
  int done = 0;
  for (const Arrival& arrival : bucket.arrivals) done += arrival.gradients;
  if (!bucket.declaration) {  // the first update, in which each rank makes its own part
    const int each = bucket.declared.begin()->second.policy.micro_batches / size_;
    bool complete = true;
    for (Rank rank = 0; rank < size_; ++rank)
      complete = complete && (!Comes(rank) || bucket.arrivals[Index(rank)].gradients >= each);
    if (complete || !DisagreementOf(bucket).empty()) return Closing::Reason::kFirst;
    return std::nullopt;
  }
  if (done >= bucket.policy().micro_batches) return Closing::Reason::kQuorum;
  if (NobodyComes()) return Closing::Reason::kLiveness;
  return std::nullopt;
}

std::optional<Closing::Reason> Coordinator::Verdict(const Bucket& bucket, Time now) const {
  if (!bucket.HasArrival()) return std::nullopt;
  if (bucket.SharesWork()) return VerdictOnUpdate(bucket);
  if (EverybodyArrived(bucket)) return bucket.declaration ? Closing::Reason::kEverybody : Closing::Reason::kFirst;
  if (!bucket.declaration || bucket.satisfied == kNever) return std::nullopt;
  if (now - bucket.satisfied >= bucket.Grace()) return Closing::Reason::kQuorum;
  return std::nullopt;
}

bool Coordinator::AnythingRuns() const {
  return std::any_of(buckets_.begin(), buckets_.end(), [](const auto& item) { return item.second.Running(); });
}

bool Coordinator::Uses(Rank rank) const {
  return std::any_of(buckets_.begin(), buckets_.end(), [rank](const auto& item) {
    return item.second.devices.count(rank) > 0 && !IsOfFlushes(item.first);
  });
}

// Rule 11: all ranks that have declared the bucket, and have not joined, have retired it.
bool Coordinator::Ends(const Bucket& bucket) const {
  if (!bucket.declaration || bucket.HasArrival()) return false;
  bool anybody = false;
  for (const auto& [rank, device] : bucket.devices) {
    if (joined_[Index(rank)]) continue;
    if (!bucket.retired[Index(rank)]) return false;
    anybody = true;
  }
  return anybody;
}

bool Coordinator::OnlyBlockedRanksAreLeft() const {
  if (AnythingRuns()) return false;
  bool anybody_ended = false;
  for (Rank rank = 0; rank < size_; ++rank) {
    const RankLevel& level = levels_[Index(rank)];
    const bool ended = level.flush == Report::Flush::kEnding;
    anybody_ended = anybody_ended || ended;
    if (level.flush == Report::Flush::kFlushing) return false;
    if (!ended && !joined_[Index(rank)] && !level.absent && !level.waiting) return false;
  }
  return anybody_ended;
}

// Rule 12. Each rank waits as a whole, for us or for Horovod, and nothing that waits for us can close: round 0 of a
// bucket that other ranks do not use, a flush to which others do not come, or an update of which a rank holds a
// micro-batch. A rank that takes results in a flush is at work, and does not count.
bool Coordinator::RanksWaitForEachOther() const {
  if (deadlock_after_ == kNever || AnythingRuns()) return false;
  for (Rank rank = 0; rank < size_; ++rank)
    if (!joined_[Index(rank)] && !levels_[Index(rank)].blocked) return false;
  for (const auto& [name, bucket] : buckets_)
    if (bucket.Draining()) return false;
  const auto elsewhere = [](const RankLevel& level) { return !level.elsewhere.empty(); };
  return flush_since_ != kNever || std::any_of(levels_.begin(), levels_.end(), elsewhere) ||
         std::any_of(buckets_.begin(), buckets_.end(), [](const auto& item) {
           const Bucket& bucket = item.second;
           return (!bucket.declaration || bucket.SharesWork()) && bucket.HasArrival();
         });
}

Report::Flush Coordinator::FlushOfAll() const {
  if (flush_since_ == kNever) return Report::Flush::kNone;  // in most cycles no rank flushes
  bool everybody_ends = true;
  bool anybody_active = false;
  for (Rank rank = 0; rank < size_; ++rank) {
    if (joined_[Index(rank)] || !Uses(rank)) continue;
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
  for (const std::string& name : ended_) {
    buckets_.erase(name);
    ledgers_.erase(name);
  }
  ended_.clear();
}

std::string Coordinator::DisagreementOf(const Bucket& bucket) const {
  const auto& [first, said] = *bucket.declared.begin();
  const Rank by = bucket.declaration ? bucket.declared_by : first;
  const Declaration& expected = bucket.declaration ? *bucket.declaration : said;
  for (const auto& [rank, declaration] : bucket.declared) {
    const std::string text =
        Disagreement("rank " + std::to_string(by), expected, "rank " + std::to_string(rank), declaration);
    if (!text.empty()) return text;
  }
  return {};
}

// Says what a rank waits for, if all of it waits.
std::string Coordinator::WaitOf(Rank rank) const {
  const RankLevel& level = levels_[Index(rank)];
  if (level.flush == Report::Flush::kFlushing) return "in a flush";
  if (level.flush == Report::Flush::kEnding) return "at the end of the program";
  for (const auto& [name, bucket] : buckets_) {
    if (!bucket.arrivals[Index(rank)].present) continue;
    const auto declared = bucket.declared.find(rank);
    const Declaration& said = declared == bucket.declared.end() ? *bucket.declaration : declared->second;
    return "in round " + std::to_string(bucket.round) + " of " + TitleOf(name, said.members) + " (" +
           said.policy.description + ")";
  }
  if (!level.elsewhere.empty()) return level.elsewhere + " of another process set";
  return "in a collective of Horovod's own, or of another process set";
}

// Returns the members of all buckets that a rank has declared and that have had no round. They are in the order of the
// model: buckets are in the order of the backward pass.
std::vector<std::string> Coordinator::DeclaredBy(Rank rank) const {
  std::vector<std::string> members;
  for (auto it = buckets_.rbegin(); it != buckets_.rend(); ++it) {
    const Bucket& bucket = it->second;
    const auto declared = bucket.declared.find(rank);
    if (bucket.declaration || declared == bucket.declared.end()) continue;
    members.insert(members.end(), declared->second.members.begin(), declared->second.members.end());
  }
  return members;
}

// Says where a rank's declarations in rounds 0 differ first from those of the first rank that has any.
std::string Coordinator::FirstDifference() const {
  Rank first = 0;
  std::vector<std::string> members;
  for (Rank rank = 0; rank < size_; ++rank) {
    const std::vector<std::string> declared = DeclaredBy(rank);
    if (members.empty()) {
      first = rank;
      members = declared;
      continue;
    }
    if (declared.empty() || declared == members) continue;
    return horovod_partial::FirstDifference("rank " + std::to_string(first), members, "rank " + std::to_string(rank),
                                            declared);
  }
  return {};
}

bool Coordinator::WaitForTheSameElsewhere() const {
  std::map<Rank, std::set<std::string>> rounds;  // by rank: the buckets in whose round 0 it waits
  for (const auto& [name, bucket] : buckets_)
    if (!bucket.declaration)
      for (const auto& [rank, declaration] : bucket.declared)
        if (!declaration.members.empty()) rounds[rank].insert(name);
  return std::any_of(rounds.begin(), rounds.end(),
                     [&](const auto& item) { return item.second != rounds.begin()->second; });
}

std::string Coordinator::DescribeDeadlock() const {
  std::map<std::string, std::string> ranks;  // ranks by what they wait for
  for (Rank rank = 0; rank < size_; ++rank)
    if (!joined_[Index(rank)]) ranks[WaitOf(rank)] += " " + std::to_string(rank);
  std::string text = "Ranks wait for each other:";
  for (const auto& [wait, who] : ranks) {
    text += text.back() == ':' ? " " : "; ";
    text += (who.find(' ', 1) == std::string::npos ? "rank" + who + " waits " : "ranks" + who + " wait ") + wait;
  }
  const std::string difference = FirstDifference();
  if (!difference.empty()) text += ". They differ first where " + difference;
  const bool shares = std::any_of(buckets_.begin(), buckets_.end(),
                                  [](const auto& item) { return item.second.declaration && item.second.SharesWork(); });
  if (shares)
    text +=
        ". Ranks that share work make different numbers of micro-batches: call other collectives once for each update, "
        "in a "
        "round hook of the optimizer";
  if (difference.empty() && WaitForTheSameElsewhere())
    text += ". They hold the same there, so one rank has wrapped an optimizer more than another, or in another order";
  return text +
         ". Use the same policy, layers and groups on every rank, and call flush() and other collectives on every rank";
}

std::vector<bool> Coordinator::Active(const Bucket& bucket) const {
  std::vector<bool> active;
  for (Rank rank = 0; rank < size_; ++rank) active.push_back(!Absent(bucket, rank));
  return active;
}

std::vector<Rank> Coordinator::InOrderOfArrival(const Bucket& bucket) const {
  std::vector<Rank> ranks;
  for (Rank rank = 0; rank < size_; ++rank)
    if (bucket.arrivals[Index(rank)].present) ranks.push_back(rank);
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](Rank a, Rank b) { return bucket.arrivals[Index(a)].time < bucket.arrivals[Index(b)].time; });
  return ranks;
}

// Returns the groups that ready ranks form now; empty if there is none.
Partition Coordinator::FormGroups(Bucket& bucket, Time now) {
  std::vector<ReadyGroups::Candidate> candidates;
  for (const Rank rank : InOrderOfArrival(bucket)) {
    const Arrival& arrival = bucket.arrivals[Index(rank)];
    candidates.push_back({rank, arrival.time + arrival.step});
  }
  const auto groups = bucket.ready_groups->Form(std::move(candidates), Active(bucket), now);
  return groups.empty() ? Partition() : PartitionOf(groups, size_);
}

// Returns the groups of a round that closes, by its policy or for another reason. In a flush of models there is nothing
// to deliver: no rank takes part, but all see that it is over.
Partition Coordinator::GroupsFor(Bucket& bucket, Closing::Reason reason) const {
  if (!bucket.declaration || !bucket.policy().grouped()) return {};
  if (EverybodyArrived(bucket) && bucket.WantsEverybody()) return {};
  if (!bucket.HasArrival()) return PartitionOf({}, size_);
  if (bucket.policy().rule != Policy::Rule::kReady) {
    if (reason == Closing::Reason::kLiveness && bucket.WantsEverybody()) return {};
    return GroupsOf(bucket.policy().schedule, bucket.round, size_);
  }
  // The ranks that were held may be too many for one group.
  const auto left = InOrderOfArrival(bucket);
  const auto most = static_cast<std::size_t>(bucket.policy().group_size);
  std::vector<Members> groups;
  for (std::size_t first = 0; first < left.size(); first += most) {
    const auto begin = left.begin() + static_cast<std::ptrdiff_t>(first);
    Members group(begin, begin + static_cast<std::ptrdiff_t>(std::min(most, left.size() - first)));
    std::sort(group.begin(), group.end());
    bucket.ready_groups->Add(group, Active(bucket));
    groups.push_back(std::move(group));
  }
  return PartitionOf(groups, size_);
}

Closing::Contribution Coordinator::ContributionOf(const Bucket& bucket, Rank rank) const {
  const Arrival& arrival = bucket.arrivals[Index(rank)];
  Closing::Contribution contribution;
  if (joined_[Index(rank)]) return contribution;
  if (arrival.present) return {arrival.gradients, true, false, arrival.work};
  contribution.gradients = bucket.pending[Index(rank)];
  if (!bucket.declaration || bucket.policy().schedule.kind == Schedule::Kind::kNone) return contribution;
  // A kept model goes into one round after the other, but no longer than max_staleness rounds.
  contribution.stale = bucket.late[Index(rank)] == 0;
  const Round age = bucket.round - bucket.last_contribution[Index(rank)];
  if (contribution.stale && age > bucket.policy().max_staleness) contribution = {};
  return contribution;
}

// Round 0 closes. From now on the bucket has a declaration and a policy.
void Coordinator::Begin(Bucket& bucket, Closing& closing) {
  std::tie(bucket.declared_by, bucket.declaration) = *bucket.declared.begin();
  const Policy& policy = bucket.policy();
  bucket.quorum = policy.quorum;
  if (policy.rule == Policy::Rule::kAuto) {
    // A new training that begins after the last one has ended begins with a quorum of all ranks.
    const auto same = [&](const auto& other) {
      return &other.second != &bucket && other.second.declaration && other.second.policy() == policy;
    };
    if (std::none_of(buckets_.begin(), buckets_.end(), same)) paces_.erase(policy.description);
    const auto& [words, pace] = *paces_.try_emplace(policy.description, Pace{AutoQuorum(size_, policy), "", {}}).first;
    bucket.quorum = pace.quorum.quorum();
    bucket.why = pace.quorum.why();
  }
  if (policy.grants) ledgers_.insert_or_assign(closing.bucket, Ledger(size_, policy.micro_batches));
  if (policy.rule == Policy::Rule::kReady) bucket.ready_groups.emplace(size_, policy.group_size, policy.window);
  const Round upcoming = std::min(CycleOf(policy.schedule, size_), kUpcoming);
  for (Round round = 1; round <= upcoming; ++round) closing.upcoming.push_back(GroupsOf(policy.schedule, round, size_));
}

Closing Coordinator::Close(const std::string& name, Bucket& bucket, Closing::Reason reason, Partition groups,
                           Time now) {
  Closing closing;
  closing.bucket = name;
  closing.round = bucket.round;
  closing.reason = reason;
  closing.groups = std::move(groups);
  deadlocked_since_ = kNever;  // something moves
  closing.flushes = unflushed_.erase(name) > 0;
  if (closing.flushes && unflushed_.empty()) closing.flush_over = flush_;
  const bool flush = bucket.declaration && bucket.policy().grouped() && !bucket.HasArrival();
  std::vector<bool> on_time(Index(size_));
  for (Rank rank = 0; rank < size_; ++rank) {
    if (!closing.Includes(rank)) {
      closing.contributions.emplace_back();
      continue;
    }
    Arrival& arrival = bucket.arrivals[Index(rank)];
    on_time[Index(rank)] = arrival.present;
    const Closing::Contribution contribution = ContributionOf(bucket, rank);
    // A round in which a rank delivers nothing, for example in a flush, does not end its staleness: only gradients do.
    if (contribution.gradients > 0 && !contribution.stale) bucket.last_contribution[Index(rank)] = bucket.round;
    closing.contributions.push_back(contribution);
    if (arrival.present) RecordOffset(bucket, rank, arrival.time - bucket.first_arrival);
    arrival = {};
    bucket.pending[Index(rank)] = 0;
    bucket.late[Index(rank)] = 0;
    bucket.late_seen[Index(rank)] = 0;
  }
  if (!bucket.declared.empty()) {
    closing.error = DisagreementOf(bucket);
    if (!bucket.declaration && reason == Closing::Reason::kLiveness) {
      closing.error =
          "No rank that is missing will ever use this bucket: they have ended, or wait in a flush. "
          "Use a new bucket on every rank, before any of them flushes or ends.";
    }
    if (!bucket.declaration) Begin(bucket, closing);
    bucket.declared.clear();
  }
  if (flush) return closing;  // no round
  if (bucket.closed != kNever) bucket.grace.RecordStep(now - bucket.closed);
  bucket.closed = now;
  bucket.last_first_arrival = bucket.first_arrival;
  bucket.last_satisfied = bucket.satisfied == kNever ? now : bucket.satisfied;
  bucket.FindFirstArrival();
  bucket.satisfied = kNever;
  if (bucket.declaration && bucket.policy().rule == Policy::Rule::kAuto) {
    closing.quorum = bucket.quorum;
    closing.why = bucket.why;
    Follow(name, bucket, on_time, now);
  }
  ++bucket.round;
  const auto ledger = ledgers_.find(name);
  if (ledger != ledgers_.end()) ledger->second.Advance(now);
  return closing;
}

// Returns the adaptive quorum that follows this bucket's rounds; null if there is none.
AutoQuorum* Coordinator::PaceSetBy(const std::string& name, const Bucket& bucket) {
  if (!bucket.declaration || bucket.policy().rule != Policy::Rule::kAuto) return nullptr;
  Pace& pace = paces_.at(bucket.policy().description);
  return pace.bucket == name ? &pace.quorum : nullptr;
}

// A round of an adaptive quorum has closed: sets the quorum of the next one. If several buckets share the policy, the
// last by name is followed, because ranks come to it last in each step. If that one has ended, or is used more rarely,
// another one is followed.
void Coordinator::Follow(const std::string& name, Bucket& bucket, const std::vector<bool>& on_time, Time now) {
  Pace& pace = paces_.at(bucket.policy().description);
  if (pace.bucket != name) {
    const auto followed = buckets_.find(pace.bucket);
    const bool gone = followed == buckets_.end() || ++pace.since[name] > AutoQuorum::kPeriod;
    if (gone || (name > pace.bucket && bucket.round >= followed->second.round - AutoQuorum::kPeriod)) {
      pace.bucket = name;
      pace.quorum.ChangeBucket();
    }
  }
  if (pace.bucket == name) {
    pace.since.clear();
    pace.quorum.Close(on_time, now);
  }
  bucket.quorum = pace.quorum.quorum();
  bucket.why = pace.quorum.why();
}

// Closes the last round of a bucket, which delivers what is pending. If nothing is pending, no rank takes part in it.
Closing Coordinator::End(const std::string& name, Bucket& bucket, Time now) {
  const bool pending =
      std::any_of(bucket.pending.begin(), bucket.pending.end(), [](int gradients) { return gradients > 0; });
  Closing closing = Close(name, bucket, Closing::Reason::kEnd, pending ? Partition() : PartitionOf({}, size_), now);
  closing.ends = true;
  ended_.push_back(name);
  return closing;
}

// Makes every bucket that is used or waited for fail on all ranks, and their flushes with it.
std::vector<Closing> Coordinator::RefuseAll(Time now) {
  const std::string text = DescribeDeadlock();
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
  for (auto& [policy, pace] : paces_) {
    for (Rank rank = 0; rank < size_; ++rank)
      if (joined_[Index(rank)]) pace.quorum.Leave(rank);
    const auto followed = buckets_.find(pace.bucket);
    if (followed == buckets_.end() || !followed->second.Running()) pace.quorum.Ended(now);
  }
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
  // If one rank gives its flush up, that ends the flush for all. The next one begins again.
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
      Partition groups = FormGroups(bucket, now);
      if (!groups.empty()) closings.push_back(Close(name, bucket, Closing::Reason::kQuorum, std::move(groups), now));
    }
    if (ready_groups) {
      again_ = again_ || (bucket.Running() && bucket.HasArrival());
      continue;
    }
    if (bucket.declaration && bucket.HasArrival() && !bucket.SharesWork()) {
      if (!Satisfied(bucket)) {
        bucket.satisfied = kNever;  // a rank that was exempt is back, and too stale to be left out
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
  // buckets that are full on some rank come last, because that rank must add results up
  for (const bool full : {false, true}) {
    for (auto& [name, bucket] : buckets_) {
      if (!bucket.HasArrival() || bucket.Running() || bucket.Draining() || bucket.Full() != full) continue;
      // A rank that has arrived and waits may still begin another micro-batch.
      if (bucket.SharesWork() && (bucket.declaration || EverybodyArrived(bucket))) continue;
      if (!(bucket.declaration ? NobodyCanCome(bucket) : NobodyWillDeclare(bucket))) continue;
      if (!closings.empty()) {
        again_ = true;  // one at a time, and only if nothing else closes
      } else {
        closings.push_back(Close(name, bucket, Closing::Reason::kLiveness, now));
      }
    }
  }
  again_ = again_ || (!closings.empty() && !closed);
  for (auto& [name, bucket] : buckets_) {
    const auto said = std::find(bucket.retired.begin(), bucket.retired.end(), true);
    const bool of_optimizer = !IsOfFlushes(name);
    bucket.retired_since = since(of_optimizer && said != bucket.retired.end(), bucket.retired_since);
    if (!of_optimizer || !Ends(bucket)) continue;
    if (bucket.Running()) {
      again_ = true;
    } else {
      closings.push_back(End(name, bucket, now));
    }
  }
  // A flush closes no round with an arrival, which a thread that does not flush may have made. Its own round delivers
  // it.
  for (const std::string& name : std::set<std::string>(unflushed_)) {
    Bucket& bucket = buckets_.at(name);
    if (bucket.HasArrival() || bucket.Running() || bucket.Draining()) continue;
    // some rank's other thread may be in the middle of a micro-batch
    if (bucket.SharesWork() && !NobodyComes()) continue;
    const auto reason = flush == Report::Flush::kEnding ? Closing::Reason::kEnd : Closing::Reason::kFlush;
    closings.push_back(Close(name, bucket, reason, now));
  }
  again_ = again_ || (!unflushed_.empty() && (!closings.empty() || AnythingRuns())) ||
           std::any_of(paces_.begin(), paces_.end(), [](const auto& item) { return item.second.quorum.WantsEnd(); });
  Grant(now);
  return closings;
}

void Coordinator::Grant(Time now) {
  if (ledgers_.empty()) return;
  std::vector<bool> comes;
  for (Rank rank = 0; rank < size_; ++rank) comes.push_back(Comes(rank));
  for (auto& [name, ledger] : ledgers_) {
    std::vector<MicroBatches> granted = ledger.Decide(comes, now);
    if (!granted.empty()) grants_.push_back({name, std::move(granted)});
  }
}

Time Coordinator::NextDeadline() const {
  if (again_) return Time::min();
  Time earliest = stuck_since_ == kNever ? kNever : stuck_since_ + kAbandonAfter;
  if (deadlocked_since_ != kNever) earliest = std::min(earliest, deadlocked_since_ + deadlock_after_);
  for (const auto& [name, ledger] : ledgers_) earliest = std::min(earliest, ledger.NextDeadline());
  for (const auto& [name, bucket] : buckets_) {
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

std::string Coordinator::DescribeWaits(Time oldest) const {
  std::ostringstream text;
  for (const auto& [name, bucket] : buckets_) {
    if (!bucket.HasArrival() || bucket.first_arrival > oldest) continue;
    const auto ledger = ledgers_.find(name);
    if (bucket.declaration && bucket.SharesWork()) {
      if (ledger == ledgers_.end()) continue;  // the bucket that keeps the grants tells it
      text << (text.tellp() > 0 ? "\n" : "") << "update " << bucket.round << " of " << bucket.Title(name)
           << " waits for micro-batches of ranks";
      for (Rank rank = 0; rank < size_; ++rank)
        if (ledger->second.IsOpen(rank)) text << ' ' << rank;
      continue;
    }
    text << (text.tellp() > 0 ? "\n" : "") << "round " << bucket.round << " of " << bucket.Title(name)
         << " waits for ranks";
    for (Rank rank = 0; rank < size_; ++rank)
      if (!bucket.arrivals[Index(rank)].present && !joined_[Index(rank)]) text << ' ' << rank;
  }
  for (const auto& [name, bucket] : buckets_) {
    if (bucket.retired_since > oldest) continue;
    text << (text.tellp() > 0 ? "\n" : "") << bucket.Title(name) << ", which other ranks use no more, waits for ranks";
    for (const auto& [rank, device] : bucket.devices)
      if (!bucket.retired[Index(rank)] && !joined_[Index(rank)]) text << ' ' << rank;
  }
  if (flush_since_ <= oldest) {
    text << (text.tellp() > 0 ? "\n" : "") << "a flush, or the end of the job, waits for ranks";
    for (Rank rank = 0; rank < size_; ++rank)
      if (levels_[Index(rank)].flush == Report::Flush::kNone && !joined_[Index(rank)] && Uses(rank))
        text << ' ' << rank;
  }
  return text.str();
}

std::map<std::string, Coordinator::Offsets> Coordinator::ArrivalOffsets() const {
  std::map<std::string, Offsets> offsets;
  for (const auto& [name, bucket] : buckets_) offsets[name] = bucket.offsets;
  return offsets;
}

std::map<std::string, std::int64_t> Coordinator::UnconnectedWindows() const {
  std::map<std::string, std::int64_t> unconnected;
  for (const auto& [name, bucket] : buckets_)
    if (bucket.ready_groups) unconnected[name] = bucket.ready_groups->unconnected();
  return unconnected;
}

}  // namespace horovod_partial
