#include "core/rounds/bucket_state.h"

#include <algorithm>

namespace horovod_partial {

// Records how long after the first rank this rank arrived. A late arrival may have a negative offset. This counts as 0.
void BucketState::RankState::RecordOffset(Time offset) {
  offset_seconds += ToSeconds(std::max(offset, Time(0)));
  ++arrivals;
}

// Returns the bucket's declaration, or null. Until all ranks agree: the declaration of the lowest rank that sent one.
const Declaration* BucketState::Known() const {
  if (declaration) return &*declaration;
  return declared.empty() ? nullptr : &declared.begin()->second;
}

bool BucketState::SharesWork() const {
  const Declaration* known = Known();
  return known != nullptr && known->policy.rule == Policy::Rule::kWorkSharing;
}

bool BucketState::HasArrival() const {
  return Any([](const RankState& rank) { return rank.arrival.has_value(); });
}

bool BucketState::EverybodyArrived() const {
  return !Any([](const RankState& rank) { return !rank.joined && !rank.arrival; });
}

// Returns true if the open round must wait for every rank, because some rank or the policy asks for that.
bool BucketState::WantsEverybody() const {
  return (declaration && IsFullRound(policy(), round)) ||
         Any([](const RankState& rank) { return rank.arrival && rank.arrival->full; });
}

// Returns true if the last round has not ended on some rank. The next round then waits for the buffers of that rank.
bool BucketState::Running() const {
  return Any([](const RankState& rank) { return rank.said.running; });
}

// Returns true if some rank has as many untaken results as it may have, but takes them now, in a flush or another wait.
bool BucketState::Draining() const {
  return Any([](const RankState& rank) { return rank.said.backlog == Report::Backlog::kDraining; });
}

// Returns true if some rank has as many untaken results as it may have.
bool BucketState::Full() const {
  return Any([](const RankState& rank) { return rank.said.backlog != Report::Backlog::kNone; });
}

// Returns true if a missing rank has missed too many rounds, or has too many untaken results (protocol.md, rule 6). A
// rank with a late arrival is not too stale, because its contribution is about to be delivered. But a round always
// waits for a rank that has as many untaken results as it may have.
bool BucketState::TooStale() const {
  return Any([this](const RankState& rank) {
    if (rank.arrival || rank.Absent()) return false;
    if (rank.said.backlog != Report::Backlog::kNone) return true;
    return rank.said.late == 0 && round - rank.last_contribution > policy().max_staleness;
  });
}

bool BucketState::Satisfied() const {
  if (WantsEverybody() || TooStale()) return false;
  if (policy().rule == Policy::Rule::kInitiator) {
    Rank rank = Initiator(policy(), round, size());
    for (int tries = 0; tries < size() && At(rank).joined; ++tries) rank = (rank + 1) % size();
    return At(rank).arrival.has_value();
  }
  int arrived = 0;
  int active = 0;
  for (const RankState& rank : ranks) {
    arrived += rank.arrival ? 1 : 0;
    active += rank.joined ? 0 : 1;
  }
  return arrived >= std::min(policy().quorum, active);
}

// Returns true if no rank that is missing in the open round can arrive (docs/protocol.md, rule 7).
bool BucketState::NobodyCanCome() const {
  return !Any([](const RankState& rank) { return !rank.arrival && !rank.CannotCome(); });
}

// Returns true if all ranks that use the bucket have retired it (docs/protocol.md, rule 11). Joined ranks do not count.
bool BucketState::Ends() const {
  const auto uses = [](const RankState& rank) { return rank.device && !rank.joined; };
  return declaration && !HasArrival() && Any(uses) &&
         !Any([&](const RankState& rank) { return uses(rank) && !rank.said.retired; });
}

Time BucketState::Grace() const {
  return policy().grace == Policy::kAutomaticGrace ? grace.Estimate() : policy().grace;
}

std::string BucketState::Title(const std::string& name) const {
  const Declaration* known = Known();
  return known == nullptr ? name : TitleOf(name, known->members);
}

std::string BucketState::Disagreement() const {
  const Rank by = declaration ? declared_by : declared.begin()->first;
  for (const auto& [rank, said] : declared) {
    const std::string text =
        horovod_partial::Disagreement("rank " + std::to_string(by), *Known(), "rank " + std::to_string(rank), said);
    if (!text.empty()) return text;
  }
  return {};
}

Closing::Contribution BucketState::ContributionOf(Rank rank) const {
  const RankState& state = At(rank);
  Closing::Contribution contribution;
  if (state.joined) return contribution;
  if (state.arrival) return {state.arrival->gradients, true, false, state.arrival->work};
  contribution.gradients = state.said.pending;
  if (!declaration || policy().schedule.kind == Schedule::Kind::kNone) return contribution;
  // A kept model stands in for its rank in later rounds, but in no more than max_staleness of them.
  contribution.stale = state.said.late == 0;
  if (contribution.stale && round - state.last_contribution > policy().max_staleness) contribution = {};
  return contribution;
}

void BucketState::FindFirstArrival() {
  first_arrival = kNever;
  for (const RankState& rank : ranks)
    if (rank.arrival) first_arrival = std::min(first_arrival, rank.arrival->time);
}

std::vector<bool> BucketState::Active() const {
  std::vector<bool> active;
  for (const RankState& rank : ranks) active.push_back(!rank.Absent());
  return active;
}

std::vector<Rank> BucketState::InOrderOfArrival() const {
  std::vector<Rank> order;
  for (Rank rank = 0; rank < size(); ++rank)
    if (At(rank).arrival) order.push_back(rank);
  std::stable_sort(order.begin(), order.end(),
                   [this](Rank a, Rank b) { return At(a).arrival->time < At(b).arrival->time; });
  return order;
}

// Returns the groups that form now of the ranks that have arrived. The result is empty if no group forms.
Partition BucketState::FormGroups(Time now) {
  std::vector<ReadyGroups::Candidate> candidates;
  for (const Rank rank : InOrderOfArrival())
    candidates.push_back({rank, At(rank).arrival->time + At(rank).arrival->step});
  const auto groups = ready_groups->Form(std::move(candidates), Active(), now);
  return groups.empty() ? Partition() : PartitionOf(groups, size());
}

// Returns the groups of a round that closes for `reason`. In a flush of models no rank is in a group, because there is
// nothing to deliver. But all ranks get the Closing message, which tells them of the flush.
Partition BucketState::GroupsFor(Closing::Reason reason) {
  if (!declaration || !policy().grouped()) return {};
  if (EverybodyArrived() && WantsEverybody()) return {};
  if (!HasArrival()) return PartitionOf({}, size());
  if (policy().rule != Policy::Rule::kReady) {
    if (reason == Closing::Reason::kLiveness && WantsEverybody()) return {};
    return GroupsOf(policy().schedule, round, size());
  }
  // Under PartialReduce ranks may be held back. So there may be more arrived ranks than one group can have.
  const auto left = InOrderOfArrival();
  const auto most = static_cast<std::size_t>(policy().group_size);
  std::vector<Members> groups;
  for (std::size_t first = 0; first < left.size(); first += most) {
    const auto begin = left.begin() + static_cast<std::ptrdiff_t>(first);
    Members group(begin, begin + static_cast<std::ptrdiff_t>(std::min(most, left.size() - first)));
    std::sort(group.begin(), group.end());
    ready_groups->Add(group, Active());
    groups.push_back(std::move(group));
  }
  return PartitionOf(groups, size());
}

bool Uses(const BucketStates& buckets, Rank rank) {
  return std::any_of(buckets.begin(), buckets.end(),
                     [rank](const auto& item) { return item.second.At(rank).device && !IsOfFlushes(item.first); });
}

}  // namespace horovod_partial
