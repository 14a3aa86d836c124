#include "core/rounds/bucket_spec.h"

#include <stdexcept>

#include "core/values/bytes.h"

namespace horovod_partial {

std::string Encode(const BucketSpec& spec) {
  Writer out;
  out.Put(Format::Of<BucketSpec>());
  out.Put(spec);
  return out.Take();
}

BucketSpec DecodeBucketSpec(const std::string& bytes) {
  Reader in(bytes, "the specification of a bucket");
  if (in.Get<std::uint32_t>() != Format::Of<BucketSpec>())
    throw std::runtime_error(
        "the specification of a bucket is of another version of horovod-partial; trace the graph anew");
  auto spec = in.Get<BucketSpec>();
  in.ExpectEnd();
  return spec;
}

}  // namespace horovod_partial
