// The parts of a step's compute time, and which part explains why a rank is slow.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// What a rank does in a step (docs/slow-ranks.md). A step has a time for each part but kCompute.
enum class Part : std::uint8_t {
  kLoader,     // waiting for the batches of the training
  kForward,    // from the last batch to the first gradient
  kBackward,   // from the first gradient to the last one
  kOptimizer,  // from the results of the step before to the end of the optimizer's step
  kOther,      // from there to the request for a batch: evaluation, saving
  kCompute,    // kForward and kBackward together
};
constexpr std::array<const char*, 6> NamesOf(Part /*part*/) {
  return {"loader", "forward", "backward", "optimizer", "other", "compute"};
}

struct Parts {
  static constexpr std::size_t kCount = 5;

  // The times of the parts by their numbers, without kCompute. Together they are the compute time. All are -1 if nothing
  // is known. Otherwise `forward` may be -1, because `backward` contains it, and `optimizer`, because another contains it.
  std::array<double, kCount> seconds = {-1, -1, -1, -1, -1};

  double& operator[](Part part) { return seconds[static_cast<std::size_t>(part)]; }
  double operator[](Part part) const { return seconds[static_cast<std::size_t>(part)]; }
  bool known() const { return (*this)[Part::kLoader] >= 0; }
  // Adds the parts of another step. A part that is known of one of them only is the sum.
  void Add(const Parts& other);

  template <class Self>
  static auto Fields(Self& self) {
    constexpr auto names = NamesOf(Part{});
    return std::make_tuple(Named(names[0], self.seconds[0]), Named(names[1], self.seconds[1]),
                           Named(names[2], self.seconds[2]), Named(names[3], self.seconds[3]),
                           Named(names[4], self.seconds[4]));
  }
};

// Sums up by parts how much longer than on the median rank the slow steps of each rank are. A recent step counts more.
class SlowParts {
 public:
  // The part that explains a rank's slowness, and its share of the time by which the rank's slow steps are longer.
  struct Cause {
    Part part;
    double share;
  };

  explicit SlowParts(int size) : excess_(static_cast<std::size_t>(size)) {}

  // Adds a step: the compute time of each rank, NaN for a rank without the step, and its parts. Throws
  // std::invalid_argument unless both have a value for each rank.
  void Step(const std::vector<double>& seconds, const std::vector<Parts>& parts);
  // Returns the cause if one part has at least half of the excess of a rank. Throws std::out_of_range without the rank.
  std::optional<Cause> CauseOf(Rank rank) const;
  // Returns the cause as the end of a sentence that says how slow the rank is, or an empty text.
  std::string Describe(Rank rank) const;

 private:
  using Times = std::array<double, Parts::kCount + 2>;  // of all values of Part, and in the last place of the step

  std::vector<Times> excess_;
};

}  // namespace horovod_partial
