// The rows of a table that have not been written yet. A table is written column by column, as one line of JSON.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/groups/groups.h"

namespace horovod_partial::recording {

// Returns a text as a JSON string, with quotation marks and escapes.
std::string Quoted(const std::string& text);

class Table {
 public:
  // Takes the name of the table and the names of its columns. The names must need no escapes in JSON.
  Table(const char* name, std::vector<const char*> columns);

  // Adds a row, with a value for each column: whole numbers, texts or lists of ranks.
  template <class... Values>
  void Add(const Values&... values) {
    std::size_t column = 0;
    ((columns_[column++].values += (rows_ > 0 ? "," : "") + JsonOf(values)), ...);
    ++rows_;
  }

  // Returns the rows as one line of JSON, with a line feed, and forgets them. Returns an empty text without any rows.
  std::string TakeLine();

 private:
  struct Column {
    const char* name;
    std::string values;  // the values of this column, separated by commas
  };
  template <class Number>
  static std::string JsonOf(const Number& number) {
    return std::to_string(number);
  }
  static std::string JsonOf(const std::string& text) { return Quoted(text); }
  static std::string JsonOf(const Members& ranks);

  const char* name_;
  std::vector<Column> columns_;
  std::size_t rows_ = 0;
};

}  // namespace horovod_partial::recording
