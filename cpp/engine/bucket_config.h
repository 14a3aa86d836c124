// What a rank declares of a bucket, a tensor that all ranks reduce under one name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/rounds/bucket.h"
#include "core/rounds/bucket_spec.h"
#include "core/rounds/declaration.h"

namespace horovod_partial {

// The specification of a bucket, with the memory, type and shape of its tensor. Only the number of the device may
// differ between the ranks.
struct BucketConfig {
  BucketSpec spec;
  Memory* memory = &Memory::Host();
  DataType type = DataType::kFloat32;
  std::vector<std::int64_t> shape;

  std::size_t elements() const { return ElementsOf(shape); }
  std::size_t bytes() const { return elements() * SizeOf(type); }
  BucketOptions options() const { return {spec, memory, type, elements()}; }
  Declaration declaration() const {
    return {spec.policy, type, shape, memory->device(), spec.prescale_factor, spec.postscale_factor, spec.members};
  }
  bool operator==(const BucketConfig& other) const {
    return memory == other.memory && type == other.type && shape == other.shape && spec == other.spec;
  }
};

}  // namespace horovod_partial
