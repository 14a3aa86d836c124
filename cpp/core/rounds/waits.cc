#include "core/rounds/waits.h"

#include <algorithm>
#include <map>
#include <set>

namespace horovod_partial {
namespace {

// Returns in words what a blocked rank waits for.
std::string WaitOf(Rank rank, const RankLevel& level, const BucketStates& buckets) {
  if (level.flush == Report::Flush::kFlushing) return "in a flush";
  if (level.flush == Report::Flush::kEnding) return "at the end of the program";
  for (const auto& [name, bucket] : buckets) {
    if (!bucket.At(rank).arrival) continue;
    const auto declared = bucket.declared.find(rank);
    const Declaration& said = declared == bucket.declared.end() ? *bucket.declaration : declared->second;
    return "in round " + std::to_string(bucket.round) + " of " + TitleOf(name, said.members) + " (" +
           said.policy.description + ")";
  }
  if (!level.elsewhere.empty()) return level.elsewhere + " of another process set";
  return "in a collective of Horovod's own, or of another process set";
}

// Returns the tensors in all buckets that a rank has declared and that have had no round. Buckets are read from last to
// first, because their names are in the order of the backward pass. So the result is in the order of the model.
std::vector<std::string> DeclaredBy(Rank rank, const BucketStates& buckets) {
  std::vector<std::string> members;
  for (auto it = buckets.rbegin(); it != buckets.rend(); ++it) {
    const BucketState& bucket = it->second;
    const auto declared = bucket.declared.find(rank);
    if (bucket.declaration || declared == bucket.declared.end()) continue;
    members.insert(members.end(), declared->second.members.begin(), declared->second.members.end());
  }
  return members;
}

// Compares what ranks have declared of buckets that have had no round. Returns a text with the first difference.
std::string FirstDifference(int size, const BucketStates& buckets) {
  Rank first = 0;
  std::vector<std::string> members;
  for (Rank rank = 0; rank < size; ++rank) {
    const std::vector<std::string> declared = DeclaredBy(rank, buckets);
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

// Returns true if ranks wait in round 0 of different buckets.
bool WaitForTheSameElsewhere(const BucketStates& buckets) {
  std::map<Rank, std::set<std::string>> rounds;  // for each rank: the buckets at which it waits in round 0
  for (const auto& [name, bucket] : buckets)
    if (!bucket.declaration)
      for (const auto& [rank, declaration] : bucket.declared)
        if (!declaration.members.empty()) rounds[rank].insert(name);
  return std::any_of(rounds.begin(), rounds.end(),
                     [&](const auto& item) { return item.second != rounds.begin()->second; });
}

// Returns the numbers of the ranks for which `condition` holds, each after a space.
template <class Condition>
std::string Ranks(std::size_t size, const Condition& condition) {
  std::string text;
  for (Rank rank = 0; rank < static_cast<Rank>(size); ++rank)
    if (condition(rank)) text += ' ' + std::to_string(rank);
  return text;
}

}  // namespace

std::string DescribeDeadlock(const std::vector<RankLevel>& levels, const BucketStates& buckets) {
  std::map<std::string, std::string> ranks;  // for each thing that ranks wait for: the numbers of these ranks
  for (std::size_t i = 0; i < levels.size(); ++i)
    if (!levels[i].joined) ranks[WaitOf(static_cast<Rank>(i), levels[i], buckets)] += " " + std::to_string(i);
  std::string text = "Ranks wait for each other:";
  for (const auto& [wait, who] : ranks) {
    text += text.back() == ':' ? " " : "; ";
    text += (who.find(' ', 1) == std::string::npos ? "rank" + who + " waits " : "ranks" + who + " wait ") + wait;
  }
  const std::string difference = FirstDifference(static_cast<int>(levels.size()), buckets);
  if (!difference.empty()) text += ". They differ first where " + difference;
  const bool shares = std::any_of(buckets.begin(), buckets.end(),
                                  [](const auto& item) { return item.second.declaration && item.second.SharesWork(); });
  if (shares)
    text +=
        ". Ranks that share work make different numbers of micro-batches: call other collectives once for each update, "
        "in a round hook of the optimizer";
  if (difference.empty() && WaitForTheSameElsewhere(buckets))
    text += ". The buckets hold the same, so one rank has wrapped an optimizer more than another, or in another order";
  return text +
         ". Use the same policy, layers and groups on every rank, and call flush() and other collectives on every rank";
}

std::string DescribeWaits(const std::vector<RankLevel>& levels, const BucketStates& buckets, Time flush_since,
                          Time oldest, bool of_rounds) {
  std::string text;
  const auto tell = [&](const std::string& what, const auto& missing) {
    text += (text.empty() ? "" : "\n") + what + Ranks(levels.size(), missing);
  };
  for (const auto& [name, bucket] : buckets) {
    if (!of_rounds || !bucket.HasArrival() || bucket.first_arrival > oldest) continue;
    const std::string where = std::to_string(bucket.round) + " of " + bucket.Title(name);
    if (!bucket.declaration || !bucket.SharesWork()) {
      tell("round " + where + " waits for ranks",
           [&](Rank rank) { return !bucket.At(rank).arrival && !bucket.At(rank).joined; });
    } else if (bucket.ledger) {  // one bucket stands for all buckets of an optimizer that shares work
      tell("update " + where + " waits for micro-batches of ranks",
           [&](Rank rank) { return bucket.ledger->IsOpen(rank); });
    }
  }
  for (const auto& [name, bucket] : buckets) {
    if (bucket.retired_since > oldest) continue;
    tell(bucket.Title(name) + ", which other ranks use no more, waits for ranks", [&](Rank rank) {
      const BucketState::RankState& state = bucket.At(rank);
      return state.device && !state.said.retired && !state.joined;
    });
  }
  if (flush_since <= oldest) {
    tell("a flush, or the end of the job, waits for ranks", [&](Rank rank) {
      const RankLevel& level = levels[Index(rank)];
      return level.flush == Report::Flush::kNone && !level.joined && Uses(buckets, rank);
    });
  }
  return text;
}

}  // namespace horovod_partial
