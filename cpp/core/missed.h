// Results that a late rank has not seen yet.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "core/buffer.h"
#include "core/dtype.h"

namespace horovod_partial {

// What a late rank gets of the results that it missed. The paper overwrites (eager-SGD, PPoPP'20, section 3.2); keeping
// their sum, or each of them, gives every replica every update (docs/policies.md has the figures).
enum class Missed : std::uint8_t {
  kSum,     // added up
  kReplay,  // apart, oldest first; beyond kReplayDepth the two oldest are added up
  kLatest,  // only the newest, as in the paper: updates are lost
};

constexpr auto NamesOf(Missed /*type*/) { return std::array{"sum", "replay", "latest"}; }

class MissedResults {
 public:
  static constexpr std::size_t kReplayDepth = 8;

  explicit MissedResults(Missed mode) : mode_(mode) {}

  // Takes the contents of `result`, and leaves in it storage of the same size to write the next result to.
  void Push(Buffer& result, DataType type, std::size_t elements);
  // The results in order; this is empty afterwards.
  std::deque<Buffer> Take();
  // Storage that Take gave out comes back.
  void Recycle(Buffer storage) {
    if (spare_.empty()) spare_ = std::move(storage);
  }
  void Clear();

  bool empty() const { return rounds_ == 0; }
  int rounds() const { return rounds_; }  // how many rounds' results are in here
  std::size_t bytes() const;              // of storage

 private:
  Missed mode_;
  std::deque<Buffer> results_;
  Buffer spare_;
  int rounds_ = 0;
};

}  // namespace horovod_partial
