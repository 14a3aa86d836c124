// Enumerations whose values have names. NamesOf(Value), beside each of them, lists the names in the order of the
// values, which count from 0.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace horovod_partial {

// Returns the value of that name. Throws std::invalid_argument with a text that begins with `what` and lists the names.
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

// Returns the value of that number. Throws std::runtime_error if there is none.
template <class Value>
Value FromNumber(std::size_t number) {
  if (number >= NamesOf(Value{}).size())
    throw std::runtime_error("an enumeration has no value " + std::to_string(number));
  return static_cast<Value>(number);
}

}  // namespace horovod_partial
