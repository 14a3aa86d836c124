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

// The types have the same numbers as in Horovod's DataType, so no number must be converted. cpp/attach asserts this.
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
constexpr auto NamesOf(DataType /*type*/) {
  return std::array{"uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool"};
}

// Calls `function` with a value of the C++ type that stands for `type`. `Half` is the caller's type for float16.
template <class Half, class Function>
auto Dispatch(DataType type, Function&& function) {
  switch (type) {
    case DataType::kUInt8: return function(std::uint8_t{});
    case DataType::kInt8: return function(std::int8_t{});
    case DataType::kUInt16: return function(std::uint16_t{});
    case DataType::kInt16: return function(std::int16_t{});
    case DataType::kInt32: return function(std::int32_t{});
    case DataType::kInt64: return function(std::int64_t{});
    case DataType::kFloat16: return function(Half{});
    case DataType::kFloat32: return function(float{});
    case DataType::kFloat64: return function(double{});
    case DataType::kBool: return function(bool{});
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

// Computes target[i] += source[i]. Booleans are combined by "or", as in Horovod's sum.
void Add(DataType type, void* target, const void* source, std::size_t elements);

// Computes data[i] *= factor. Integers are truncated, as in Horovod's scaling.
void Scale(DataType type, void* data, std::size_t elements, double factor);

// Returns false if an element is infinite or not a number. The result is always true for integers.
bool AllFinite(DataType type, const void* data, std::size_t elements);

}  // namespace horovod_partial
