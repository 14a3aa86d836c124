// A structure lists its fields in one place, and an enumeration its names. Encoding and comparison use these lists.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace horovod_partial {

// A field of a structure, and the name of that field in Python.
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

template <class Struct, class = std::enable_if_t<kHasFields<Struct>>>
bool operator==(const Struct& one, const Struct& other) {
  return Struct::Fields(one) == Struct::Fields(other);
}

// Returns the name of an enumerator.
template <class Value, class = std::enable_if_t<std::is_enum_v<Value>>>
const char* NameOf(Value value) {
  return NamesOf(value)[static_cast<std::size_t>(value)];
}

// Returns the enumerator with this name. If there is none, throws std::invalid_argument with `what` and all names.
template <class Value>
Value FromName(const char* what, const std::string& name) {
  constexpr auto names = NamesOf(Value{});
  std::string known;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (name == names[i]) return static_cast<Value>(i);
    known += i == 0 ? "'" : i + 1 < names.size() ? ", '" : " or '";
    known += names[i];
    known += "'";
  }
  throw std::invalid_argument(std::string(what) + " must be " + known + ", not '" + name + "'");
}

// Returns the enumerator with this number. Throws std::runtime_error if the enumeration has no such value.
template <class Value>
Value FromNumber(std::size_t number) {
  if (number >= NamesOf(Value{}).size())
    throw std::runtime_error("an enumeration has no value " + std::to_string(number));
  return static_cast<Value>(number);
}

}  // namespace horovod_partial
