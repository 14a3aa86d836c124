#include "core/rounds/bucket_spec.h"

#include <stdexcept>

#include "core/values/bytes.h"

namespace horovod_partial {

std::string Encode(const BucketSpec& spec) { return BytesOf(Format::Of<BucketSpec>()) + BytesOf(spec); }

BucketSpec DecodeBucketSpec(const std::string& bytes) {
  constexpr const char* kWhat = "the specification of a bucket";
  const std::string format = bytes.substr(0, sizeof(std::uint32_t));
  if (FromBytes<std::uint32_t>(format, kWhat) != Format::Of<BucketSpec>())
    throw std::runtime_error(
        "the specification of a bucket is of another version of horovod-partial; trace the graph anew");
  return FromBytes<BucketSpec>(bytes.substr(format.size()), kWhat);
}

}  // namespace horovod_partial
