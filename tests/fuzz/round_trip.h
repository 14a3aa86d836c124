// What a decoder can read is written as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/values/bytes.h"

template <class Value>
int RoundTrip(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    if (horovod_partial::BytesOf(horovod_partial::FromBytes<Value>(bytes, "a value")) != bytes) __builtin_trap();
  } catch (const std::runtime_error&) {
  }
  return 0;
}
