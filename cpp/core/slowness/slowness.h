// How slow a rank is, since which step, and in what way.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>

#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// In what way a rank is slow.
enum class SlownessKind : std::uint8_t {
  kPersistent,  // nearly all steps are slow
  kGrowing,     // nearly all steps are slow, and they become slower
  kBursts,      // slow for several steps in a row, and again later
  kRandom,      // some steps are slow, one by one
};
constexpr std::array<const char*, 4> NamesOf(SlownessKind) { return {"persistent", "growing", "bursts", "random"}; }

// Several steps of a rank that are slow, or many of which are. A step is slow if its compute time is clearly above the
// median of the other ranks in that step.
struct Slowness {
  Rank rank = 0;
  SlownessKind kind = SlownessKind::kPersistent;
  std::int64_t begin = 0;   // the first slow step
  std::int64_t end = -1;    // the first step that is not slow any more; -1 while the rank is slow
  std::int64_t steps = 0;   // the number of slow steps
  std::int64_t length = 0;  // the number of steps from `begin` to `end`, or to the last one that counts so far
  // How many times as long as the median of the other ranks the slow steps take: the median, and its 95 % interval.
  double factor = 1, low = 1, high = 1;
  double burst = 0, period = 0;  // of bursts: the median length, and from one begin to the next, in steps; otherwise 0
  double lost = 0;               // by how many steps of the median rank this rank has held up the others since `begin`

  template <class Self>
  static auto Fields(Self& self) {
    return std::tuple(Named("rank", self.rank), Named("kind", self.kind), Named("begin", self.begin),
                      Named("end", self.end), Named("steps", self.steps), Named("length", self.length),
                      Named("factor", self.factor), Named("low", self.low), Named("high", self.high),
                      Named("burst", self.burst), Named("period", self.period), Named("lost", self.lost));
  }

  bool operator==(const Slowness& other) const { return Fields(*this) == Fields(other); }

  // Says how slow the rank is: the rest of a sentence that begins with the rank's name.
  std::string Describe() const;
};

}  // namespace horovod_partial
