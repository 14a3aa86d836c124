// Specifications of buckets, as a saved graph of TensorFlow may hold them.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/bucket_spec.h"

using namespace horovod_partial;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    const std::string again = Encode(DecodeBucketSpec(bytes));
    if (again != bytes) __builtin_trap();
  } catch (const std::runtime_error&) {
  }
  return 0;
}
