#include "engine/surroundings.h"

namespace horovod_partial {
namespace {

// How many owners of buckets in this process are gone. A counter in a header would exist once in each shared library.
std::atomic<std::uint64_t> departures{0};

}  // namespace

void Surroundings::ThrowShutDown() const {
  throw EngineError(
      first_failure->Explain("Horovod has been shut down, by this rank or by another one that ended or failed"));
}

void Owner::Leave() {
  gone_ = true;
  ++departures;
}

std::uint64_t Owner::Departures() { return departures; }

}  // namespace horovod_partial
