// Enumerations whose values have names. For each such enumeration a function NamesOf(value) lists the names in the
// order of the values, which count from 0.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace horovod_partial {

// Returns the enumerator of this name. If there is none, throws std::invalid_argument with `what` and all names.
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

// Returns the enumerator of this number. Throws std::runtime_error if the enumeration has no such value.
template <class Value>
Value FromNumber(std::size_t number) {
  if (number >= NamesOf(Value{}).size())
    throw std::runtime_error("an enumeration has no value " + std::to_string(number));
  return static_cast<Value>(number);
}

}  // namespace horovod_partial
