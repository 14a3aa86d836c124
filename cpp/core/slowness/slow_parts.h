// The parts of a step's compute time, and which of them explains why a rank is slow (docs/slow-ranks.md has the parts).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// kCompute is kForward and kBackward together. It has no time of its own.
enum class Part : std::uint8_t { kLoader, kForward, kBackward, kOptimizer, kOther, kCompute };
constexpr std::array<const char*, 6> NamesOf(Part /*part*/) {
  return {"loader", "forward", "backward", "optimizer", "other", "compute"};
}

// The seconds of each part but kCompute. Together they are the compute time. All are -1 if they are unknown. Otherwise
// kForward and kOptimizer may be -1, because another part contains them.
struct Parts {
  std::array<double, 5> seconds = {-1, -1, -1, -1, -1};

  double& operator[](Part part) { return seconds[static_cast<std::size_t>(part)]; }
  double operator[](Part part) const { return seconds[static_cast<std::size_t>(part)]; }

  template <class Self>
  static auto Fields(Self& self) {
    constexpr auto names = NamesOf(Part{});
    auto& [loader, forward, backward, optimizer, other] = self.seconds;
    return std::make_tuple(Named(names[0], loader), Named(names[1], forward), Named(names[2], backward),
                           Named(names[3], optimizer), Named(names[4], other));
  }
};

// Sums up, part by part, how much longer than on the median rank the slow steps of each rank are.
class SlowParts {
 public:
  explicit SlowParts(int size) : excess_(static_cast<std::size_t>(size)) {}

  // Adds a step, with the parts of each rank. They are unknown for a rank without the step.
  void Step(const std::vector<Parts>& parts);

  struct Cause {
    std::string part = "none";
    std::string text;  // the end of a sentence that says how slow the rank is
  };
  // Returns the part that has at least half of a rank's excess, if there is one.
  Cause CauseOf(Rank rank) const;

 private:
  using Times = std::array<double, 7>;  // of all values of Part, and then of the step

  std::vector<Times> excess_;
};

}  // namespace horovod_partial
