// Encodes values as a string of bytes, and decodes them: numbers, enumerations with names, times, texts, optional
// values, lists of all these, and structures that list their fields.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// Encodes values, in the machine's byte order: all ranks run the same build on the same kind of machine.
class Writer {
 public:
  template <class Value>
  void Put(const Value& value) {
    if constexpr (kHasFields<Value>) {
      std::apply([this](const auto&... field) { (this->Put(field.value), ...); }, Value::Fields(value));
    } else {
      static_assert(std::is_arithmetic_v<Value> || std::is_enum_v<Value>);
      bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
  }
  void Put(const Time& time) { Put(static_cast<std::int64_t>(time.count())); }
  void Put(const std::string& text) {
    Put(static_cast<std::uint32_t>(text.size()));
    bytes_ += text;
  }
  template <class Value>
  void Put(const std::vector<Value>& values) {
    Put(static_cast<std::uint32_t>(values.size()));
    for (const Value& value : values) Put(value);
  }
  template <class Value>
  void Put(const std::optional<Value>& value) {
    Put(value.has_value());
    if (value) Put(*value);
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Decodes values. Throws std::runtime_error for malformed bytes; the text of the error calls the bytes `what`.
class Reader {
 public:
  Reader(const std::string& bytes, const char* what) : bytes_(bytes), what_(what) {}

  template <class Value>
  Value Get() {
    Value value{};
    Read(value);
    return value;
  }
  void ExpectEnd() const {
    if (at_ != bytes_.size()) throw std::runtime_error(std::string(what_) + " has trailing bytes");
  }

 private:
  template <class Value>
  void Read(Value& value) {
    if constexpr (kHasFields<Value>) {
      std::apply([this](const auto&... field) { (this->Read(field.value), ...); }, Value::Fields(value));
    } else if constexpr (std::is_enum_v<Value>) {
      value = FromNumber<Value>(Get<std::underlying_type_t<Value>>());
    } else if constexpr (std::is_same_v<Value, bool>) {
      const auto number = Get<std::uint8_t>();
      if (number > 1) throw std::runtime_error(std::string(what_) + " has a truth value of " + std::to_string(number));
      value = number == 1;
    } else {
      static_assert(std::is_arithmetic_v<Value>);
      std::memcpy(&value, Advance(sizeof value), sizeof value);
    }
  }
  void Read(Time& time) { time = Time(Get<std::int64_t>()); }
  void Read(std::string& text) {
    const auto size = Get<std::uint32_t>();
    text.assign(Advance(size), size);
  }
  template <class Value>
  void Read(std::vector<Value>& values) {
    for (auto count = Get<std::uint32_t>(); count > 0; --count) values.push_back(Get<Value>());
  }
  template <class Value>
  void Read(std::optional<Value>& value) {
    if (Get<bool>()) value = Get<Value>();
  }
  const char* Advance(std::size_t size) {
    if (bytes_.size() - at_ < size) throw std::runtime_error(std::string(what_) + " is cut short");
    const char* here = bytes_.data() + at_;
    at_ += size;
    return here;
  }

  const std::string& bytes_;
  const char* const what_;
  std::size_t at_ = 0;
};

template <class Value>
std::string BytesOf(const Value& value) {
  Writer bytes;
  bytes.Put(value);
  return bytes.Take();
}

// Decodes one value. Throws std::runtime_error if the bytes are malformed, or go on after the value.
template <class Value>
Value FromBytes(const std::string& bytes, const char* what) {
  Reader reader(bytes, what);
  auto value = reader.Get<Value>();
  reader.ExpectEnd();
  return value;
}

// A hash of how a type is encoded. It changes with the names, the order or the types of the fields or enumerators. The
// hash is not cryptographic: two different encodings have the same hash with a chance of one in four billion.
class Format {
 public:
  template <class Value>
  static std::uint32_t Of() {
    Format format;
    format.Add(static_cast<const Value*>(nullptr));
    return format.hash_;
  }

 private:
  template <class Value>
  void Add(const Value* /*type*/) {
    if constexpr (kHasFields<Value>) {
      const Value value{};
      std::apply([this](const auto&... field) { (this->AddField(field), ...); }, Value::Fields(value));
    } else if constexpr (std::is_enum_v<Value>) {
      for (const char* name : NamesOf(Value{})) AddText(name);
    } else {
      AddText(std::is_floating_point_v<Value> ? "real" : "number");
      AddText(std::to_string(sizeof(Value)));
    }
  }
  void Add(const std::string* /*type*/) { AddText("text"); }
  template <class Value>
  void Add(const std::vector<Value>* /*type*/) {
    AddText("list");
    Add(static_cast<const Value*>(nullptr));
  }
  template <class Value>
  void AddField(const Field<Value>& field) {
    AddText(field.name);
    Add(&field.value);
  }
  // Adds a text to the hash, which is FNV-1a. The terminating zero of the text is included.
  void AddText(const std::string& text) {
    for (std::size_t i = 0; i <= text.size(); ++i)
      hash_ = (hash_ ^ static_cast<unsigned char>(text.c_str()[i])) * 16777619u;
  }

  std::uint32_t hash_ = 2166136261u;
};

}  // namespace horovod_partial
