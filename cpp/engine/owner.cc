#include "engine/owner.h"

namespace horovod_partial {
namespace {

std::atomic<std::uint64_t> departures{0};  // one for the process, so not in the header: libraries would have copies

}  // namespace

void Owner::Leave() {
  gone_ = true;
  ++departures;
}

std::uint64_t Owner::Departures() { return departures; }

}  // namespace horovod_partial
