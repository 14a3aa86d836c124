#include "core/slowness/slowness.h"

#include <cmath>
#include <iomanip>
#include <sstream>

namespace horovod_partial {
namespace {

// Returns a factor with as many digits as it is worth telling.
std::string Factor(double factor) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(factor < 2 ? 2 : factor < 10 ? 1 : 0) << factor;
  return text.str();
}

}  // namespace

std::string Slowness::Describe() const {
  std::ostringstream text;
  text << "takes " << Factor(factor) << " times (95 %: " << Factor(low) << " to " << Factor(high)
       << ") as long as the median rank, in " << steps << " of " << length << " steps "
       << (end < 0 ? "since step " : "from step ") << begin;
  if (end >= 0) text << " to " << end - 1;
  if (kind == SlownessKind::kGrowing) text << ", and becomes slower";
  if (kind == SlownessKind::kBursts)
    text << ", in bursts of " << std::llround(burst) << " steps every " << std::llround(period);
  if (kind == SlownessKind::kRandom) text << ", at random";
  return text.str();
}

}  // namespace horovod_partial
