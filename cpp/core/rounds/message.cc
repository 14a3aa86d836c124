#include "core/rounds/message.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "core/values/bytes.h"

namespace horovod_partial {
namespace {

constexpr int kMostGradients = 1 << 30;  // a number of gradients must be below this, because it travels in 30 bits

// Returns true if two ranks are in one group, or if `rank` has no value. Runs for every arrival, so it must be fast.
bool SameGroup(const Partition& groups, std::optional<Rank> rank, std::size_t other) {
  if (groups.empty() || !rank) return true;
  const int group = groups.at(Index(*rank));
  return group != kNoGroup && groups.at(other) == group;
}

}  // namespace

bool BucketSet::Has(const std::string& bucket) const {
  return all || std::binary_search(names.begin(), names.end(), bucket);
}

int Closing::fresh(std::optional<Rank> rank) const {
  int count = 0;
  for (std::size_t other = 0; other < contributions.size(); ++other)
    count += SameGroup(groups, rank, other) && contributions[other].fresh ? 1 : 0;
  return count;
}

int Closing::gradients(std::optional<Rank> rank) const {
  int count = 0;
  for (std::size_t other = 0; other < contributions.size(); ++other)
    count += SameGroup(groups, rank, other) ? contributions[other].gradients : 0;
  return count;
}

Members Closing::members(Rank rank) const { return GroupOf(groups, rank, static_cast<int>(contributions.size())); }

bool Closing::Includes(Rank rank) const { return groups.empty() || groups.at(Index(rank)) != kNoGroup; }

void Check(const Report& report, int size) {
  const auto is_count = [](int count) { return count >= 0 && count < kMostGradients; };
  const auto is_time = [](Time time) { return time >= Time(0) && time <= kLongest; };
  for (const auto& item : report.items) {
    if (!is_count(item.gradients) || !is_count(item.late) || !is_time(item.age))
      throw std::runtime_error("a report of bucket " + item.bucket + " has numbers that no rank can have");
    if (item.share && !(is_count(item.share->begun) && is_count(item.share->granted) && is_time(item.share->computed) &&
                        is_time(item.share->age)))
      throw std::runtime_error("a report of bucket " + item.bucket + " has micro-batches that no rank can have");
    if (item.declaration) Check(item.declaration->policy, size);
  }
}

std::string Encode(const Report& report) { return BytesOf(report); }

Report DecodeReport(const std::string& bytes) { return FromBytes<Report>(bytes, "a report"); }

std::string Encode(const std::vector<Grants>& grants) { return BytesOf(grants); }

std::vector<Grants> DecodeGrants(const std::string& bytes) { return FromBytes<std::vector<Grants>>(bytes, "grants"); }

// A Closing is encoded as these words, in this order:
// - the number of ranks
// - two words for the round
// - one word for reason, flush_over, flushes and ends
// - the number of partitions: all of `upcoming`, and also `groups` unless it is empty
// - 1 if `groups` is among the partitions, otherwise 0
// - for each rank, two words for its contribution
// - the partitions, `groups` first; a partition has one word for each rank, the number of the rank's group
void Append(const Closing& closing, std::vector<std::int32_t>& words) {
  const auto round = static_cast<std::uint64_t>(closing.round);
  const bool grouped = !closing.groups.empty();
  words.push_back(static_cast<std::int32_t>(closing.contributions.size()));
  words.push_back(static_cast<std::int32_t>(static_cast<std::uint32_t>(round)));
  words.push_back(static_cast<std::int32_t>(static_cast<std::uint32_t>(round >> 32)));
  words.push_back(static_cast<std::int32_t>(closing.reason) << 4 | static_cast<std::int32_t>(closing.flush_over) << 2 |
                  (closing.flushes ? 2 : 0) | (closing.ends ? 1 : 0));
  words.push_back(static_cast<std::int32_t>(closing.upcoming.size()) + (grouped ? 1 : 0));
  words.push_back(grouped ? 1 : 0);
  for (const auto& contribution : closing.contributions) {
    const auto gradients = static_cast<std::uint32_t>(contribution.gradients);
    words.push_back(
        static_cast<std::int32_t>(gradients << 2 | (contribution.stale ? 2u : 0u) | (contribution.fresh ? 1u : 0u)));
    words.push_back(contribution.work);
  }
  words.insert(words.end(), closing.groups.begin(), closing.groups.end());
  for (const Partition& partition : closing.upcoming) words.insert(words.end(), partition.begin(), partition.end());
}

Closing DecodeClosing(const std::vector<std::int32_t>& words, std::size_t& at) {
  const auto next = [&] {
    if (at >= words.size()) throw std::runtime_error("a closing is cut short");
    return words[at++];
  };
  Closing closing;
  const std::int32_t ranks = next();
  const auto low = static_cast<std::uint32_t>(next());
  const auto high = static_cast<std::uint32_t>(next());
  closing.round = static_cast<Round>(std::uint64_t{low} | std::uint64_t{high} << 32);
  const std::int32_t reason = next();
  closing.reason = FromNumber<Closing::Reason>(static_cast<std::uint32_t>(reason >> 4));
  closing.flush_over = FromNumber<Report::Flush>(static_cast<std::uint32_t>(reason >> 2 & 3));
  closing.flushes = (reason & 2) != 0;
  closing.ends = (reason & 1) != 0;
  std::int32_t partitions = next();
  const bool grouped = next() != 0;
  if (ranks < 0 || partitions < 0) throw std::runtime_error("a closing has a negative number of ranks or partitions");
  // The size of the message is checked before memory is allocated for the ranks and the partitions.
  const auto needed = (std::uint64_t{2} + static_cast<std::uint64_t>(partitions)) * static_cast<std::uint64_t>(ranks);
  if (needed > words.size() - at || (ranks == 0 && partitions > 0)) throw std::runtime_error("a closing is cut short");
  std::uint64_t gradients = 0;
  for (std::int32_t rank = 0; rank < ranks; ++rank) {
    const auto word = static_cast<std::uint32_t>(next());
    const std::int32_t work = next();
    gradients += word >> 2;
    if (gradients > std::numeric_limits<int>::max())
      throw std::runtime_error("a closing counts more gradients than there can be");
    closing.contributions.push_back({static_cast<int>(word >> 2), (word & 1u) != 0, (word & 2u) != 0, work});
  }
  const auto partition = [&] {
    Partition groups;
    for (std::int32_t rank = 0; rank < ranks; ++rank) groups.push_back(next());
    return groups;
  };
  if (grouped) {
    closing.groups = partition();
    --partitions;
  }
  for (; partitions > 0; --partitions) closing.upcoming.push_back(partition());
  return closing;
}

}  // namespace horovod_partial
