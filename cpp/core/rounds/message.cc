#include "core/rounds/message.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "core/values/bytes.h"
namespace horovod_partial {
namespace {

constexpr int kMostGradients = 1 << 30;  // no rank can have so many gradients

// Returns how many words are as long as so many bytes.
std::size_t WordsFor(std::size_t bytes) { return (bytes + sizeof(std::int32_t) - 1) / sizeof(std::int32_t); }

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

void Append(const Closing& closing, std::vector<std::int32_t>& words) {
  const std::string bytes = BytesOf(closing);
  words.push_back(static_cast<std::int32_t>(bytes.size()));
  const std::size_t begin = words.size();
  words.resize(begin + WordsFor(bytes.size()));
  std::memcpy(words.data() + begin, bytes.data(), bytes.size());
}

Closing DecodeClosing(const std::vector<std::int32_t>& words, std::size_t& at) {
  const std::size_t size = at < words.size() ? static_cast<std::uint32_t>(words[at++]) : 0;
  if (WordsFor(size) > words.size() - at) throw std::runtime_error("a closing is cut short");
  const std::string bytes(reinterpret_cast<const char*>(words.data() + at), size);
  at += WordsFor(size);
  auto closing = FromBytes<Closing>(bytes, "a closing");
  bool is_possible = true;
  std::int64_t gradients = 0;
  for (const Closing::Contribution& each : closing.contributions) {
    is_possible = is_possible && each.gradients >= 0;
    gradients += each.gradients;
  }
  const auto fits = [&](const Partition& groups) { return groups.size() == closing.contributions.size(); };
  is_possible = is_possible && gradients <= std::numeric_limits<int>::max() &&
                (closing.groups.empty() || fits(closing.groups)) &&
                std::all_of(closing.upcoming.begin(), closing.upcoming.end(), fits);
  if (!is_possible) throw std::runtime_error("a closing has numbers that no coordinator sends");
  return closing;
}

}  // namespace horovod_partial
