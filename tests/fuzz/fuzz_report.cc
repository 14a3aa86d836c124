// Reports, as another rank may send them.
#include "core/rounds/message.h"
#include "round_trip.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return RoundTrip<horovod_partial::Report>(data, size);
}
