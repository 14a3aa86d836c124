// Values that differ from a given one in a single place.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial::test {

inline std::vector<Time> Others(const Time& time) { return {time + Time(1)}; }
inline std::vector<std::string> Others(const std::string& text) { return {text + '\0'}; }
template <class Value>
std::vector<std::vector<Value>> Others(const std::vector<Value>& values) {
  std::vector<std::vector<Value>> others(1, values);
  others.back().emplace_back();
  return others;
}
template <class Value>
std::vector<std::optional<Value>> Others(const std::optional<Value>& value) {
  return {value ? std::nullopt : std::optional<Value>(Value{})};
}
template <class Value>
std::vector<Value> Others(const Value& value);

template <class Struct, std::size_t index>
void AddOthersOfField(const Struct& value, std::vector<Struct>& others) {
  for (const auto& other : Others(std::get<index>(Struct::Fields(value)).value)) {
    others.push_back(value);
    std::get<index>(Struct::Fields(others.back())).value = other;
  }
}

template <class Struct, std::size_t... index>
void AddOthers(const Struct& value, std::vector<Struct>& others, std::index_sequence<index...> /*fields*/) {
  (AddOthersOfField<Struct, index>(value, others), ...);
}

// Of a structure, at least one for each field; of an enumeration, all other values.
template <class Value>
std::vector<Value> Others(const Value& value) {
  std::vector<Value> others;
  if constexpr (kHasFields<Value>) {
    AddOthers(value, others, std::make_index_sequence<std::tuple_size_v<decltype(Value::Fields(value))>>());
  } else if constexpr (std::is_enum_v<Value>) {
    for (std::size_t number = 0; number < NamesOf(value).size(); ++number)
      if (FromNumber<Value>(number) != value) others.push_back(FromNumber<Value>(number));
  } else {
    others.push_back(static_cast<Value>(value == Value{} ? 1 : 0));
  }
  return others;
}

}  // namespace horovod_partial::test
