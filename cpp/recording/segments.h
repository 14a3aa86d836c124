// The files of one recording: so many bytes at most, of which the oldest go first.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace horovod_partial::recording {

// Each write is one call of the system's, without a buffer of ours: what was written survives the process. Used by one
// thread.
class Segments {
 public:
  static constexpr int kSegments = 4;

  // Makes `folder`, with the folders above it, and the first segment in it: `name`.0000.jsonl. `preamble` is what each
  // segment begins with, by its number. Throws std::runtime_error.
  Segments(std::string folder, std::string name, std::size_t most_bytes, std::function<std::string(int)> preamble);
  ~Segments();
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  // Whole lines. Throws std::runtime_error, as where the disk is full.
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
  std::size_t written_ = 0;  // to this segment
};

}  // namespace horovod_partial::recording
