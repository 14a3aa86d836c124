// Heartbeats of a rank to rank 0: words on a stream of bytes.
#include <stdexcept>

#include "core/watch/activity.h"
#include "round_trip.h"

using namespace horovod_partial;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Words words;
  words.Add({reinterpret_cast<const char*>(data), size});
  try {
    while (const auto word = words.Next())
      RoundTrip<Beat>(reinterpret_cast<const std::uint8_t*>(word->data()), word->size());
  } catch (const std::runtime_error&) {
  }
  return 0;
}
