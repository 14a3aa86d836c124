// Structures that list their fields once. Comparison, encoding and Python's keyword arguments all use this list.
#pragma once

#include <type_traits>
#include <utility>

namespace horovod_partial {

// A field of a structure, with its name in Python.
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

// True if a structure has a static function Fields(self), which returns a tuple of its fields.
template <class Struct, class = void>
inline constexpr bool kHasFields = false;
template <class Struct>
inline constexpr bool kHasFields<Struct, std::void_t<decltype(Struct::Fields(std::declval<Struct&>()))>> = true;

}  // namespace horovod_partial
