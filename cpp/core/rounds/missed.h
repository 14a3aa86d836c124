// Results that a late rank has not seen yet.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "core/values/buffer.h"
#include "core/values/dtype.h"

namespace horovod_partial {

// What a late rank gets of the results that it missed. The paper overwrites them (eager-SGD, PPoPP'20, section 4.1.1).
// If their sum, or each of them, is kept, every replica gets every update (docs/policies.md has the figures).
enum class Missed : std::uint8_t {
  kSum,     // one result, their sum, as soon as the rank arrives
  kReplay,  // each result by itself; the application takes whole rounds of the family, oldest first
  kLatest,  // only the newest, as in the paper: updates are lost
};

constexpr auto NamesOf(Missed /*type*/) { return std::array{"sum", "replay", "latest"}; }

class MissedResults {
 public:
  // The result of one round, or of several that had to be added up.
  struct Result {
    Buffer sum;  // without storage if there is no gradient in it
    int rounds = 0;
    int gradients = 0;
  };

  // With kReplay up to `limit` results are kept. If there are more, the two oldest are added up.
  explicit MissedResults(Missed mode, int limit = 1) : mode_(mode), limit_(mode == Missed::kReplay ? limit : 1) {}

  // Takes the contents of `result`, and leaves other storage of the same size there, or none.
  void Push(Buffer& result, int gradients, DataType type, std::size_t elements);
  // Adds a round that has no result for this rank, because the number of rounds must be right.
  void PushEmpty();
  // Removes the oldest result, and returns it.
  Result Pop();
  // Gives storage that came from Pop back, for the next result.
  void Recycle(Buffer storage) {
    if (spare_.empty()) spare_ = std::move(storage);
  }
  // Drops all results, but keeps the number of rounds.
  void MakeEmpty();
  void Clear() { results_.clear(); }
  // With kReplay: the oldest results are being taken in all buckets of a family, one bucket after the other. Meanwhile
  // no results are added up.
  void BeTaken(bool being_taken) { being_taken_ = being_taken; }

  bool empty() const { return results_.empty(); }
  int rounds() const;                     // how many rounds are in here
  int oldest_rounds() const;              // how many rounds are in the oldest result
  int gradients() const;                  // gradients in all results
  int summed() const { return summed_; }  // with kReplay: how many rounds were ever added to others
  std::size_t bytes() const;              // size of the storage

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
