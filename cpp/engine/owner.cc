#include "engine/owner.h"

namespace horovod_partial {
namespace {

// Counts the owners that have left in the whole process. In a header, each library would have its own counter.
std::atomic<std::uint64_t> departures{0};

}  // namespace

void Owner::Leave() {
  gone_ = true;
  ++departures;
}

std::uint64_t Owner::Departures() { return departures; }

}  // namespace horovod_partial
