#include "engine/owner.h"

namespace horovod_partial {
namespace {

// How many owners in this process are gone. In a header, each shared library would have a counter of its own.
std::atomic<std::uint64_t> departures{0};

}  // namespace

void Owner::Leave() {
  gone_ = true;
  ++departures;
}

std::uint64_t Owner::Departures() { return departures; }

}  // namespace horovod_partial
