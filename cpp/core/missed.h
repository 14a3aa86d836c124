// Results that a late rank has not seen yet.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "core/buffer.h"
#include "core/dtype.h"

namespace horovod_partial {

// What a late rank gets of the results that it missed. The paper overwrites (eager-SGD, PPoPP'20, section 4.1.1);
// keeping their sum, or each of them, gives every replica every update (docs/policies.md has the figures).
enum class Missed : std::uint8_t {
  kSum,     // added up, as one result, as soon as the rank arrives
  kReplay,  // each apart, until the application takes whole rounds of the bucket's family, oldest first
  kLatest,  // only the newest, as in the paper: updates are lost
};

constexpr auto NamesOf(Missed /*type*/) { return std::array{"sum", "replay", "latest"}; }

class MissedResults {
 public:
  // One round's, or that of several which had to be added up.
  struct Result {
    Buffer sum;  // without storage if there is no gradient in it
    int rounds = 0;
    int gradients = 0;
  };

  // With kReplay results are kept apart up to `limit` of them; beyond, the two oldest are added up.
  explicit MissedResults(Missed mode, int limit = 1) : mode_(mode), limit_(mode == Missed::kReplay ? limit : 1) {}

  // Takes the contents of `result`, and leaves storage of the same size there, or none.
  void Push(Buffer& result, int gradients, DataType type, std::size_t elements);
  // A round that has no result for this rank: only its number counts.
  void PushEmpty();
  // The oldest.
  Result Pop();
  // Storage that Pop gave out comes back.
  void Recycle(Buffer storage) {
    if (spare_.empty()) spare_ = std::move(storage);
  }
  // Keeps the numbers of the rounds, without their results.
  void MakeEmpty();
  void Clear() { results_.clear(); }
  // With kReplay: the oldest are being taken in all buckets of a family, one bucket after the other, and until then
  // they are not added to others.
  void BeTaken(bool being_taken) { being_taken_ = being_taken; }

  bool empty() const { return results_.empty(); }
  int rounds() const;                     // how many rounds' results are in here
  int oldest_rounds() const;              // and in the oldest of them
  int gradients() const;                  // in all of them
  int summed() const { return summed_; }  // with kReplay: rounds that had to be added to others, ever
  std::size_t bytes() const;              // of storage

 private:
  void MakeRoom(DataType type, std::size_t elements);

  Missed mode_;
  int limit_;
  std::deque<Result> results_;
  Buffer spare_;
  bool being_taken_ = false;
  int summed_ = 0;
};

}  // namespace horovod_partial
