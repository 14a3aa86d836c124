// Specifications of buckets, as a saved graph of TensorFlow may hold them.
#include "core/rounds/bucket_spec.h"
#include "round_trip.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return RoundTrip(data, size, horovod_partial::DecodeBucketSpec);
}
