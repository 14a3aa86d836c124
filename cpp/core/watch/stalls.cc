#include "core/watch/stalls.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace horovod_partial {
namespace {

// A wait counts as too long this many heartbeat intervals before the limit. So it is logged before the limit: rank 0
// may notice the wait one interval late, and logs it only if it sees the wait at the ends of two intervals.
constexpr int kAhead = 3;
// A rank that lives sends a heartbeat in each interval. So at the end of an interval of this process, the rank's last
// heartbeat is no more than this many intervals old.
constexpr int kHeard = 2;
// A stall is logged if rank 0 sees it at the ends of this many intervals in a row. When rank 0 goes on after a stop, it
// reads old messages first. One interval later it has read new ones.
constexpr int kSeen = 2;

bool IsSilent(int silence, int limit) { return silence > limit / 2; }

std::string NameAll(const std::set<Rank>& ranks) {
  std::ostringstream text;
  text << (ranks.size() == 1 ? "rank" : "ranks");
  for (auto rank = ranks.begin(); rank != ranks.end();) {
    const Rank first = *rank;
    Rank last = first;
    for (++rank; rank != ranks.end() && *rank == last + 1; ++rank) ++last;
    text << ' ' << first;
    if (last > first) text << (last == first + 1 ? " " : "-") << last;
  }
  return text.str();
}

void Add(std::string& list, const std::string& clause) { list += (list.empty() ? "" : "; ") + clause; }

}  // namespace

std::string Lasted(int intervals, Time interval) {
  const double seconds = intervals * ToSeconds(interval);
  std::ostringstream text;
  text << (seconds < 10 ? std::round(10 * seconds) / 10 : std::round(seconds)) << " s";
  return text.str();
}

std::string Describe(const Activity& own, Time interval) {
  if (own.kind != Activity::Kind::kWaiting) return "is in no wait that is known, and others wait for it";
  return "has waited in " + own.what + " for " + Lasted(own.intervals, interval) + " and longer";
}

std::set<Rank> Stall::Writers() const {
  std::set<Rank> writers = computing;
  for (const auto& item : waiting) writers.insert(item.second.begin(), item.second.end());
  return writers;
}

std::string Stall::Describe(Time interval) const {
  std::string waits, missing;
  for (const auto& [what, ranks] : waiting) Add(waits, NameAll(ranks) + " in " + what);
  if (!computing.empty())
    Add(missing,
        NameAll(computing) + (computing.size() == 1 ? ", which computes or sleeps" : ", which compute or sleep"));
  for (const auto& [rank, intervals_of] : silent)
    Add(missing, NameAll({rank}) + ", which has given no sign of life for " + Lasted(intervals_of, interval) +
                     ": it is stopped, or its host or its network is down");
  for (const auto& [what, ranks] : resting) Add(missing, NameAll(ranks) + " in " + what);
  if (!gone.empty()) Add(missing, NameAll(gone) + (gone.size() == 1 ? ", which has ended" : ", which have ended"));
  if (missing.empty()) missing = "no rank: they wait for each other";
  return "waiting for " + Lasted(intervals, interval) + " and longer: " + waits + ". Missing: " + missing +
         ". The stacks of all threads of " + NameAll(Writers()) + " are in their standard error";
}

bool Telling::Begins(bool due) {
  quiet_ = std::max<std::int64_t>(0, quiet_ - 1);
  if (!due || told_ || quiet_ > 0) return false;
  quiet_ = pause_;
  return told_ = true;
}

bool StallWatch::Lasts(const Activity& activity) const {
  return activity.kind == Activity::Kind::kWaiting && activity.intervals >= limit_ - kAhead;
}

bool StallWatch::IsHeard(const WatchedRank& member) const { return !member.gone && member.silent <= kHeard; }

StallWatch::News StallWatch::Pass() {
  bool lasts = false;  // true if some rank has reported a long wait
  for (auto& [rank, member] : members_) {
    ++member.silent;
    lasts = lasts || (!member.gone && Lasts(member.activity));
  }
  const Stall stall = Find();
  seen_ = stall.waiting.empty() ? 0 : seen_ + 1;
  // While overdue heartbeats do not yet prove that a rank is stopped, nothing is logged.
  const bool open = std::any_of(members_.begin(), members_.end(), [&](const auto& item) {
    const WatchedRank& member = item.second;
    return !member.gone && !IsHeard(member) && !IsSilent(member.silent, limit_);
  });
  News news;
  if (telling_.Begins(seen_ >= kSeen && !open)) news.begins = stall;
  news.ends = telling_.Ends(lasts);
  return news;
}

// Returns the present stall. If there is no stall, the result has no waiting ranks.
Stall StallWatch::Find() const {
  Stall stall;
  std::set<Rank> needed;
  for (const auto& [rank, member] : members_) {
    if (!IsHeard(member) || !Lasts(member.activity)) continue;
    stall.intervals = std::max(stall.intervals, member.activity.intervals);
    needed.insert(member.activity.needed.begin(), member.activity.needed.end());
    if (member.activity.needed.empty())
      for (const auto& other : members_) needed.insert(other.first);
  }
  for (const Rank rank : needed) {
    const auto found = members_.find(rank);
    if (found == members_.end()) continue;
    const WatchedRank& member = found->second;
    const Activity& activity = member.activity;
    if (member.gone) {
      stall.gone.insert(rank);
    } else if (!IsHeard(member)) {
      stall.silent[rank] = member.silent;
    } else if (activity.kind == Activity::Kind::kResting) {
      stall.resting[activity.what].insert(rank);
      // A wait of 0 intervals has just begun, so the rank counts as computing.
    } else if (activity.kind == Activity::Kind::kWaiting && activity.intervals > 0) {
      stall.waiting[activity.what].insert(rank);
    } else {
      stall.computing.insert(rank);
    }
  }
  return stall;
}

bool LonelyWatch::Pass(int silence, const Activity& own, int held) {
  const int waits = own.kind == Activity::Kind::kWaiting ? own.intervals : 0;
  const bool is_silent = IsSilent(silence, limit_);
  const bool begins = telling_.Begins(is_silent && std::max(waits, held) >= limit_ - kAhead);
  telling_.Ends(is_silent);
  return begins;
}

}  // namespace horovod_partial
