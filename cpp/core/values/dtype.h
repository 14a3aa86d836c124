// Element types, and the few element-wise operations that contributions need on the host.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/values/fields.h"

namespace horovod_partial {

// The types of tensors that buckets can have. They have the same numbers as in Horovod's DataType, so no number must be
// converted. cpp/attach asserts this.
enum class DataType : std::uint8_t { kInt32 = 4, kInt64 = 5, kFloat16 = 6, kFloat32 = 7, kFloat64 = 8 };
constexpr auto NamesOf(DataType /*type*/) {  // by Horovod's number; no bucket has one of the first four types
  return std::array{"uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"};
}

// Calls `function` with a value of the C++ type that stands for `type`. `Half` is the caller's type for float16.
template <class Half, class Function>
auto Dispatch(DataType type, Function&& function) {
  switch (type) {
    case DataType::kInt32: return function(std::int32_t{});
    case DataType::kInt64: return function(std::int64_t{});
    case DataType::kFloat16: return function(Half{});
    case DataType::kFloat32: return function(float{});
    case DataType::kFloat64: return function(double{});
  }
  throw std::invalid_argument("unknown data type " + std::to_string(static_cast<int>(type)));
}

std::size_t SizeOf(DataType type);
// Returns the number of elements of a tensor with this shape.
inline std::size_t ElementsOf(const std::vector<std::int64_t>& shape) {
  std::size_t elements = 1;
  for (const std::int64_t dimension : shape) elements *= static_cast<std::size_t>(dimension);
  return elements;
}

// Computes target[i] += source[i].
void Add(DataType type, void* target, const void* source, std::size_t elements);

// Computes data[i] *= factor. Integers are truncated, as in Horovod's scaling.
void Scale(DataType type, void* data, std::size_t elements, double factor);

// Returns false if an element is infinite or not a number. The result is always true for integers.
bool AllFinite(DataType type, const void* data, std::size_t elements);

}  // namespace horovod_partial
