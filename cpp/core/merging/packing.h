// Lays out several tensors in one bucket.
#pragma once

#include <cstdint>
#include <vector>

namespace horovod_partial {

// Returns the offset of each tensor in the bucket, in elements, followed by the size of the bucket. Tensors are
// aligned, because results are views of the bucket and TensorFlow wants aligned tensors. A single tensor is sent from
// where it lies, so it gets no padding.
inline std::vector<std::int64_t> PackedOffsets(const std::vector<std::int64_t>& elements, std::int64_t element_bytes) {
  constexpr std::int64_t kAlignment = 64;
  const std::int64_t unit = elements.size() == 1 ? 1 : kAlignment / element_bytes;
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t count : elements) offsets.push_back(offsets.back() + (count + unit - 1) / unit * unit);
  return offsets;
}

}  // namespace horovod_partial
