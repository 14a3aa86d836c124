// Element types and the few element-wise operations that contributions need on the host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace horovod_partial {

// The values are those of Horovod's DataType, so that they travel unchanged; attach/ asserts it.
enum class DataType : std::uint8_t {
  kUInt8 = 0,
  kInt8 = 1,
  kUInt16 = 2,
  kInt16 = 3,
  kInt32 = 4,
  kInt64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBool = 9,
};

std::size_t SizeOf(DataType type);
const char* NameOf(DataType type);

// target[i] += source[i]; booleans are or-ed, as Horovod's sum does.
void Add(DataType type, void* target, const void* source, std::size_t elements);

// data[i] *= factor. Integers are truncated, as Horovod's scaling does.
void Scale(DataType type, void* data, std::size_t elements, double factor);

// False if an element is infinite or not a number. Always true for integers.
bool AllFinite(DataType type, const void* data, std::size_t elements);

}  // namespace horovod_partial
