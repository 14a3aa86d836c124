// Makes Python classes of the C++ structures that list their fields.
#pragma once

#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <type_traits>

#include "bindings/conversions.h"
#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// Sets a field to a value from Python. The value of an enumeration is its name, and a time is a number of seconds.
template <class Value>
void SetField(const Field<Value>& field, const pybind11::handle& given) try {
  if constexpr (std::is_enum_v<Value>) {
    field.value = FromName<Value>(field.name, given.cast<std::string>());
  } else if constexpr (std::is_same_v<Value, Time>) {
    field.value = FromSeconds(given.cast<double>());
  } else {
    field.value = given.cast<Value>();
  }
} catch (const pybind11::cast_error&) {
  throw pybind11::type_error(std::string(field.name) + " cannot be " + pybind11::repr(given).cast<std::string>());
}

template <class Value>
pybind11::object GetField(const Field<Value>& field) {
  using Plain = std::remove_const_t<Value>;
  if constexpr (std::is_enum_v<Plain>) {
    return pybind11::str(NameOf(field.value));
  } else if constexpr (std::is_same_v<Plain, Time>) {
    return pybind11::float_(ToSeconds(field.value));
  } else {
    return pybind11::cast(field.value);
  }
}

// Returns the structure `made` after setting the fields in `given`.
template <class Struct>
Struct WithFields(Struct made, const pybind11::kwargs& given) {
  for (const auto& [key, value] : given) {
    const auto name = key.template cast<std::string>();
    const auto set = [&name = name, &value = value](const auto& field) {
      if (name != field.name) return false;
      SetField(field, value);
      return true;
    };
    if (!std::apply([&](const auto&... field) { return (set(field) || ...); }, Struct::Fields(made)))
      throw pybind11::type_error("there is no field " + name);
  }
  return made;
}

// Binds a structure as a Python class with readable fields. Its constructor and `replace` take fields as keywords.
template <class Struct>
pybind11::class_<Struct> BindFields(pybind11::module_& m, const char* name) {
  pybind11::class_<Struct> bound(m, name);
  bound.def(pybind11::init([](const pybind11::kwargs& fields) { return WithFields(Struct(), fields); }));
  bound.def("replace", &WithFields<Struct>);
  bound.def(pybind11::self == pybind11::self);
  bound.attr("__hash__") = pybind11::none();
  bound.def("__getattr__", [](const Struct& self, const std::string& wanted) {
    pybind11::object value;
    const auto get = [&](const auto& field) {
      if (wanted == field.name) value = GetField(field);
    };
    std::apply([&](const auto&... field) { (get(field), ...); }, Struct::Fields(self));
    if (!value) throw pybind11::attribute_error("there is no field " + wanted);
    return value;
  });
  return bound;
}

}  // namespace horovod_partial
