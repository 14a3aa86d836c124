#include "engine/bucket_config.h"

namespace horovod_partial {

std::size_t BucketConfig::elements() const {
  std::size_t elements = 1;
  for (const std::int64_t dimension : shape) elements *= static_cast<std::size_t>(dimension);
  return elements;
}

BucketOptions BucketConfig::options() const {
  BucketOptions options;
  static_cast<Handling&>(options) = spec;
  options.memory = memory;
  options.type = type;
  options.elements = elements();
  return options;
}

Declaration BucketConfig::declaration() const {
  return {spec.policy, type, shape, memory->device(), spec.prescale_factor, spec.postscale_factor, spec.members};
}

bool BucketConfig::operator==(const BucketConfig& other) const {
  return memory == other.memory && type == other.type && shape == other.shape && spec == other.spec;
}

}  // namespace horovod_partial
