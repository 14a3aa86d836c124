#include "engine/owner.h"

namespace horovod_partial {
namespace {

// one for the whole process; in a header each library would have its own copy
std::atomic<std::uint64_t> departures{0};

}  // namespace

void Owner::Leave() {
  gone_ = true;
  ++departures;
}

std::uint64_t Owner::Departures() { return departures; }

}  // namespace horovod_partial
