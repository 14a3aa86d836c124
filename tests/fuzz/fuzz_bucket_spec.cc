// Specifications of buckets, as a saved graph of TensorFlow may hold them.
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/rounds/bucket_spec.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    if (Encode(horovod_partial::DecodeBucketSpec(bytes)) != bytes) __builtin_trap();
  } catch (const std::runtime_error&) {
  }
  return 0;
}
