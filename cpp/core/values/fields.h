// Structures that list their fields once. Comparing, encoding and setting them all use this list.
#pragma once

#include <type_traits>
#include <utility>

namespace horovod_partial {

// A field of a structure, with the name that Python uses for it.
template <class Value>
struct Field {
  const char* name;
  Value& value;

  bool operator==(const Field& other) const { return value == other.value; }
};

template <class Value>
Field<Value> Named(const char* name, Value& value) {
  return {name, value};
}

// Whether a structure has a static function Fields(self), which returns a tuple of its fields.
template <class Struct, class = void>
inline constexpr bool kHasFields = false;
template <class Struct>
inline constexpr bool kHasFields<Struct, std::void_t<decltype(Struct::Fields(std::declval<Struct&>()))>> = true;

}  // namespace horovod_partial
