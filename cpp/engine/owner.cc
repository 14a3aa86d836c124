#include "engine/owner.h"

namespace horovod_partial {
namespace {

// How many owners of buckets in this process are gone. In a header, this would be one counter for each shared library.
std::atomic<std::uint64_t> departures{0};

}  // namespace

void Owner::Leave() {
  gone_ = true;
  ++departures;
}

std::uint64_t Owner::Departures() { return departures; }

}  // namespace horovod_partial
