#include "recording/segments.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace horovod_partial::recording {
namespace {

[[noreturn]] void Throw(const std::string& path) {
  throw std::runtime_error("cannot write " + path + ": " + std::system_category().message(errno));
}

}  // namespace

Segments::Segments(std::string folder, std::string name, std::size_t most_bytes,
                   std::function<std::string(int)> preamble)
    : folder_(std::move(folder)),
      name_(std::move(name)),
      segment_bytes_(most_bytes / kSegments),
      preamble_(std::move(preamble)) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) throw std::runtime_error("cannot make the folder " + folder_ + ": " + error.message());
  Open();
}

std::string Segments::PathOf(int segment) const {
  char number[16];
  std::snprintf(number, sizeof number, ".%04d.jsonl", segment);
  return folder_ + '/' + name_ + number;
}

void Segments::Open() {
  const std::string path = PathOf(segment_);
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
  if (file_ < 0) Throw(path);
  written_ = 0;
  WriteAll(preamble_(segment_));
}

void Segments::Close() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

void Segments::Write(const std::string& lines) {
  if (lines.empty()) return;
  if (written_ > 0 && written_ + lines.size() > segment_bytes_) {
    Close();
    ++segment_;
    std::error_code ignored;  // it is no error if the file has been removed already
    if (segment_ >= kSegments) std::filesystem::remove(PathOf(segment_ - kSegments), ignored);
    Open();
  }
  WriteAll(lines);
}

void Segments::WriteAll(const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t count = write(file_, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) Throw(PathOf(segment_));
    done += count < 0 ? 0 : static_cast<std::size_t>(count);
  }
  written_ += text.size();
}

}  // namespace horovod_partial::recording
