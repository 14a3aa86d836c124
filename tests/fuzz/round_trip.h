// What a decoder can read is written as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

template <class Decode>
int RoundTrip(const std::uint8_t* data, std::size_t size, Decode decode) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    if (Encode(decode(bytes)) != bytes) __builtin_trap();
  } catch (const std::runtime_error&) {
  }
  return 0;
}
