// The files (segments) of one recording. The oldest file is removed, so that their total size stays below a limit.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "core/values/types.h"

namespace horovod_partial::recording {

// Writes go to the operating system at once, so no lines are lost if the process dies. To be used by one thread.
class Segments : private NonCopyable {
 public:
  static constexpr int kSegments = 4;

  // Makes `folder`, with the folders above it, and in it the first segment, `name`.0000.jsonl. `preamble` takes the
  // number of a segment, and returns its first lines. Throws std::runtime_error if the files cannot be written.
  Segments(std::string folder, std::string name, std::size_t most_bytes, std::function<std::string(int)> preamble);
  ~Segments() { Close(); }

  // Writes whole lines, into a new segment if they do not fit. Throws std::runtime_error, for example on a full disk.
  void Write(const std::string& lines);

 private:
  std::string PathOf(int segment) const;
  void Open();
  void Close();
  void WriteAll(const std::string& text);

  const std::string folder_;
  const std::string name_;
  const std::size_t segment_bytes_;
  const std::function<std::string(int)> preamble_;
  int segment_ = 0;
  int file_ = -1;
  std::size_t written_ = 0;  // the number of bytes in the present segment
};

}  // namespace horovod_partial::recording
