#include "core/values/dtype.h"

#include <cmath>
#include <cstring>
#include <type_traits>

namespace horovod_partial {
namespace {

// A float16 (IEEE 754 binary16) as bits, because code in cpp/core uses no compiler extensions.
struct Half {
  std::uint16_t bits;
};

float ToFloat(Half half) {
  const std::uint32_t sign = (half.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (half.bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = half.bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint32_t word =
      exponent == 0x1f ? (sign | 0x7f800000u | (mantissa << 13)) : (sign | ((exponent + 112) << 23) | (mantissa << 13));
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// Rounds to the nearest float16; a tie goes to the even value.
Half ToHalf(float value) {
  std::uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  const auto sign = static_cast<std::uint16_t>((word >> 16) & 0x8000u);
  const std::uint32_t magnitude = word & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x47800000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // the number is subnormal in float16, where the unit is 2^-24
    float positive;
    std::memcpy(&positive, &magnitude, sizeof positive);
    return {static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(std::nearbyint(std::ldexp(positive, 24))))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - (112u << 23)) >> 13))};
}

}  // namespace

std::size_t SizeOf(DataType type) {
  return Dispatch<Half>(type, [](auto value) { return sizeof(value); });
}

void Add(DataType type, void* target, const void* source, std::size_t elements) {
  Dispatch<Half>(type, [&](auto value) {
    using T = decltype(value);
    auto* to = static_cast<T*>(target);
    const auto* from = static_cast<const T*>(source);
    for (std::size_t i = 0; i < elements; ++i) {
      if constexpr (std::is_same_v<T, Half>) {
        to[i] = ToHalf(ToFloat(to[i]) + ToFloat(from[i]));
      } else {
        to[i] += from[i];
      }
    }
  });
}

void Scale(DataType type, void* data, std::size_t elements, double factor) {
  Dispatch<Half>(type, [&](auto value) {
    using T = decltype(value);
    auto* at = static_cast<T*>(data);
    const auto single = static_cast<float>(factor);
    for (std::size_t i = 0; i < elements; ++i) {
      if constexpr (std::is_same_v<T, Half>) {
        at[i] = ToHalf(ToFloat(at[i]) * single);
      } else if constexpr (std::is_same_v<T, float>) {
        at[i] *= single;
      } else {
        at[i] = static_cast<T>(static_cast<double>(at[i]) * factor);
      }
    }
  });
}

bool AllFinite(DataType type, const void* data, std::size_t elements) {
  return Dispatch<Half>(type, [&](auto value) {
    using T = decltype(value);
    const auto* at = static_cast<const T*>(data);
    if constexpr (std::is_same_v<T, Half>) {
      for (std::size_t i = 0; i < elements; ++i)
        if ((at[i].bits & 0x7c00u) == 0x7c00u) return false;
    } else if constexpr (std::is_floating_point_v<T>) {
      // x * 0 is 0 if x is finite, and NaN otherwise. So one sum tests all elements, and the compiler can vectorise it.
      T sum = 0;
      for (std::size_t i = 0; i < elements; ++i) sum += at[i] * T{0};
      return sum == T{0};
    }
    return true;
  });
}

}  // namespace horovod_partial
