#include "core/slowness/slow_parts.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace horovod_partial {
namespace {

constexpr double kLeastFactor = 1.1;  // a step counts if it is longer than on the median rank by this factor
constexpr double kRecent = 1.0 / 64;  // a sum forgets this share of its past with each step that counts
constexpr double kLeastShare = 0.5;   // a part with this share of the excess explains it
constexpr double kNearlyAll = 0.9;    // if one pass has this share of the excess of both, only that pass is named
constexpr std::size_t kStep = 6;      // the place of the whole step behind its parts
constexpr std::array<const char*, kStep> kWhat = {"waiting for data",
                                                  "the forward pass",
                                                  "the backward pass",
                                                  "the optimizer",
                                                  "work between steps, such as evaluation or saving",
                                                  "the forward and backward passes"};

constexpr std::size_t At(Part part) { return static_cast<std::size_t>(part); }

}  // namespace

void SlowParts::Step(const std::vector<Parts>& parts) {
  std::vector<std::pair<std::size_t, Times>> known;
  for (std::size_t rank = 0; rank < excess_.size(); ++rank) {
    const Parts& told = parts.at(rank);
    if (told[Part::kLoader] < 0) continue;
    Times of{};
    std::transform(told.seconds.begin(), told.seconds.end(), of.begin(), [](double one) { return std::max(one, 0.0); });
    of[kStep] = std::accumulate(of.begin(), of.end(), 0.0);
    of[At(Part::kCompute)] = of[At(Part::kForward)] + of[At(Part::kBackward)];
    if (told[Part::kForward] < 0) of[At(Part::kBackward)] = 0;  // the passes have no times of their own
    known.emplace_back(rank, of);
  }
  if (known.size() < 2) return;
  Times usual{};  // the medians; of an even number of ranks the lower one of the two in the middle
  for (std::size_t part = 0; part < usual.size(); ++part) {
    const auto middle = known.begin() + static_cast<std::ptrdiff_t>((known.size() - 1) / 2);
    std::nth_element(known.begin(), middle, known.end(),
                     [part](const auto& one, const auto& other) { return one.second[part] < other.second[part]; });
    usual[part] = middle->second[part];
  }
  for (const auto& [rank, of] : known)
    for (std::size_t part = 0; part < usual.size() && of[kStep] > kLeastFactor * usual[kStep]; ++part)
      excess_[rank][part] = (1 - kRecent) * excess_[rank][part] + of[part] - usual[part];
}

SlowParts::Cause SlowParts::CauseOf(Rank rank) const {
  const Times& excess = excess_.at(Index(rank));
  Part most = Part::kLoader;
  for (const Part part : {Part::kCompute, Part::kOptimizer, Part::kOther})
    if (excess[At(part)] > excess[At(most)]) most = part;
  if (excess[kStep] <= 0 || excess[At(most)] < kLeastShare * excess[kStep]) return {};
  const double share = std::min(excess[At(most)] / excess[kStep], 1.0);
  for (const Part pass : {Part::kForward, Part::kBackward})
    if (most == Part::kCompute && excess[At(pass)] >= kNearlyAll * excess[At(most)]) most = pass;
  return {NameOf(most), ": " + std::to_string(std::lround(100 * share)) + " % of the excess is " + kWhat[At(most)]};
}

}  // namespace horovod_partial
