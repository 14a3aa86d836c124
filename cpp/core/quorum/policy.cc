#include "core/quorum/policy.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace horovod_partial {
namespace {

constexpr Round kMostRounds = std::numeric_limits<std::int32_t>::max();

constexpr std::size_t kKept = 64;      // from how many steps and lags the grace is learned
constexpr double kShareOfStep = 0.05;  // a lag is worth a grace if it is no longer than this share of a step

void Require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("no policy can have such a ") + what);
}

}  // namespace

void Check(const Policy& policy, int size) {
  const Schedule& schedule = policy.schedule;
  // A partition gives each rank a group number from 0 to `size` - 1.
  const auto is_partition = [size](const Partition& partition) {
    return partition.size() == static_cast<std::size_t>(size) &&
           std::all_of(partition.begin(), partition.end(), [size](int group) { return group >= 0 && group < size; });
  };
  Require(policy.quorum >= 1, "quorum");
  Require(policy.max_staleness >= 0 && policy.max_staleness <= kMostRounds, "bound of staleness");
  Require(policy.grace >= Policy::kAutomaticGrace && policy.grace <= kLongest, "grace period");
  Require(policy.period >= 0 && policy.period <= kMostRounds, "period");
  Require(policy.rule != Policy::Rule::kReady || policy.group_size >= 1, "size of groups");
  Require(policy.rule != Policy::Rule::kReady || policy.window >= 1, "window");
  const bool shares = policy.rule == Policy::Rule::kWorkSharing;
  const bool divides = policy.micro_batches >= size && policy.micro_batches % size == 0;
  Require(shares ? divides : policy.micro_batches == 0 && !policy.grants, "number of micro-batches");
  switch (schedule.kind) {
    case Schedule::Kind::kNone: break;
    case Schedule::Kind::kButterfly: Require(schedule.group_size >= 1, "size of groups"); break;
    case Schedule::Kind::kTable:
      Require(!schedule.table.empty() && std::all_of(schedule.table.begin(), schedule.table.end(), is_partition),
              "table of groups");
  }
}

bool IsFullRound(const Policy& policy, Round round) { return policy.period > 0 && (round + 1) % policy.period == 0; }

Rank Initiator(const Policy& policy, Round round, int size) {
  // The draw is SplitMix64 of (seed, round). So draws are independent, and none needs an earlier draw.
  std::uint64_t x = policy.seed + 0x9e3779b97f4a7c15u * (static_cast<std::uint64_t>(round) + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return static_cast<Rank>(x % static_cast<std::uint64_t>(size));
}

void GraceEstimator::Record(std::deque<Time>& window, Time newest) {
  window.push_back(newest);
  if (window.size() > kKept) window.pop_front();
  if (steps_.empty() || lags_.empty()) return;
  std::deque<Time> steps = steps_;
  const auto median = steps.begin() + static_cast<std::ptrdiff_t>((steps.size() - 1) / 2);
  std::nth_element(steps.begin(), median, steps.end());
  const Time cap(static_cast<Time::rep>(kShareOfStep * static_cast<double>(median->count())));
  std::size_t within = 0;
  Time longest{0};
  for (const Time lag : lags_) {
    if (lag > cap) continue;
    ++within;
    longest = std::max(longest, lag);
  }
  estimate_ = 2 * within > lags_.size() ? longest : Time{0};
}

}  // namespace horovod_partial
