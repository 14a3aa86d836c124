#include "engine/owner.h"

namespace horovod_partial {
namespace {

// One counter for the whole process. In a header each library would have a counter of its own.
std::atomic<std::uint64_t> departures{0};

}  // namespace

void Owner::Leave() {
  gone_ = true;
  ++departures;
}

std::uint64_t Owner::Departures() { return departures; }

}  // namespace horovod_partial
