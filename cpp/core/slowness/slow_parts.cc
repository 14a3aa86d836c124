#include "core/slowness/slow_parts.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace horovod_partial {
namespace {

constexpr double kLeastFactor = 1.1;     // a step counts if it is longer than on the median rank by this factor
constexpr double kRecent = 1.0 / 64;     // a sum forgets this share of its past with each step that counts
constexpr double kLeastShare = 0.5;      // a part with this share of the excess explains it
constexpr double kNearlyAll = 0.9;       // if one pass has this share of both passes' excess, only that pass is named
constexpr std::array<const char*, Parts::kCount + 1> kWhat = {
    "waiting for data", "the forward pass", "the backward pass",
    "the optimizer",    "work between steps, such as evaluation or saving",
    "the forward and backward passes"};

constexpr std::size_t At(Part part) { return static_cast<std::size_t>(part); }
constexpr std::size_t kStep = Parts::kCount + 1;

}  // namespace

void Parts::Add(const Parts& other) {
  for (std::size_t part = 0; part < kCount; ++part)
    if (other.seconds[part] >= 0) seconds[part] = std::max(seconds[part], 0.0) + other.seconds[part];
}

void SlowParts::Step(const std::vector<double>& seconds, const std::vector<Parts>& parts) {
  if (seconds.size() != excess_.size() || parts.size() != excess_.size())
    throw std::invalid_argument("a step needs a time and parts for each of " + std::to_string(excess_.size()) +
                                " ranks");
  std::vector<std::size_t> ranks;
  std::vector<Times> times;
  for (std::size_t rank = 0; rank < seconds.size(); ++rank) {
    if (!std::isfinite(seconds[rank]) || !parts[rank].known()) continue;
    Times of{};
    for (std::size_t part = 0; part < Parts::kCount; ++part) of[part] = std::max(parts[rank].seconds[part], 0.0);
    of[At(Part::kCompute)] = of[At(Part::kForward)] + of[At(Part::kBackward)];
    // Where the two passes cannot be told apart, neither has a time of its own.
    if (parts[rank][Part::kForward] < 0) of[At(Part::kBackward)] = 0;
    of[kStep] = seconds[rank];
    ranks.push_back(rank);
    times.push_back(of);
  }
  if (times.size() < 2) return;
  Times usual{};  // the median of each; of an even number of ranks the lower of the two in the middle
  for (std::size_t part = 0; part < usual.size(); ++part) {
    std::vector<double> of_ranks;
    for (const Times& of : times) of_ranks.push_back(of[part]);
    const auto middle = of_ranks.begin() + static_cast<std::ptrdiff_t>((of_ranks.size() - 1) / 2);
    std::nth_element(of_ranks.begin(), middle, of_ranks.end());
    usual[part] = *middle;
  }
  for (std::size_t i = 0; i < times.size(); ++i) {
    if (times[i][kStep] <= kLeastFactor * usual[kStep]) continue;
    Times& excess = excess_[ranks[i]];
    for (std::size_t part = 0; part < usual.size(); ++part)
      excess[part] = (1 - kRecent) * excess[part] + times[i][part] - usual[part];
  }
}

std::optional<SlowParts::Cause> SlowParts::CauseOf(Rank rank) const {
  const Times& excess = excess_.at(Index(rank));
  Part most = Part::kLoader;
  for (const Part part : {Part::kCompute, Part::kOptimizer, Part::kOther})
    if (excess[At(part)] > excess[At(most)]) most = part;
  if (excess[kStep] <= 0 || excess[At(most)] < kLeastShare * excess[kStep]) return std::nullopt;
  const double both = excess[At(Part::kCompute)];
  for (const Part pass : {Part::kForward, Part::kBackward})
    if (most == Part::kCompute && excess[At(pass)] >= kNearlyAll * both) most = pass;
  return Cause{most, std::min(excess[At(most)] / excess[kStep], 1.0)};
}

std::string SlowParts::Describe(Rank rank) const {
  const auto cause = CauseOf(rank);
  if (!cause) return "";
  return ": " + std::to_string(std::lround(100 * cause->share)) + " % of the excess is " + kWhat[At(cause->part)];
}

}  // namespace horovod_partial
