// Rows that have not been written yet, as the columns of one line of JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/groups.h"

namespace horovod_partial::recording {

// Not thread-safe.
class Table {
 public:
  // Names are plain words.
  Table(const char* name, std::vector<const char*> columns);

  // A row, with a value for each column: whole numbers, texts and lists of ranks.
  template <class... Values>
  void Add(const Values&... values) {
    std::size_t column = 0;
    (Append(columns_[column++], values), ...);
    ++rows_;
  }

  // The rows as a line with its end, and forgets them; nothing where there is none.
  std::string TakeLine();

 private:
  struct Column {
    const char* name;
    std::string values;  // with commas between them
  };
  void Append(Column& column, std::int64_t number);
  void Append(Column& column, const std::string& text);
  void Append(Column& column, const Members& ranks);
  std::string& NextOf(Column& column);

  const char* name_;
  std::vector<Column> columns_;
  std::size_t rows_ = 0;
};

// A text as JSON writes it, with its quotation marks.
std::string Quoted(const std::string& text);

}  // namespace horovod_partial::recording
