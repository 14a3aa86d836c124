#include "recording/table.h"

#include <cstdio>

namespace horovod_partial::recording {

Table::Table(const char* name, std::vector<const char*> columns) : name_(name) {
  for (const char* column : columns) columns_.push_back({column, {}});
}

std::string Table::JsonOf(const Members& ranks) {
  std::string list;
  for (const Rank rank : ranks) list += (list.empty() ? "" : ",") + std::to_string(rank);
  return '[' + list + ']';
}

std::string Table::TakeLine() {
  if (rows_ == 0) return "";
  std::string line = std::string("{\"table\":\"") + name_ + '"';
  for (Column& column : columns_) {
    line += std::string(",\"") + column.name + "\":[" + column.values + ']';
    column.values.clear();
  }
  rows_ = 0;
  return line + "}\n";
}

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char character : text) {
    if (character == '"' || character == '\\') {
      quoted += '\\';
      quoted += character;
    } else if (static_cast<unsigned char>(character) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(character));
      quoted += code;
    } else {
      quoted += character;
    }
  }
  return quoted + '"';
}

}  // namespace horovod_partial::recording
