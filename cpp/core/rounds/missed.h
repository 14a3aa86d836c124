// Results that a late rank has not seen yet.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "core/values/dtype.h"
#include "core/values/memory.h"

namespace horovod_partial {

// What a late rank gets of the results that it missed. The paper overwrites older results (eager-SGD, PPoPP'20, section
// 4.1.1). If a rank gets all results, its replica gets every update (figures in docs/policies.md).
enum class Missed : std::uint8_t {
  kSum,     // the sum of all missed results, as soon as the rank arrives
  kReplay,  // each result by itself; the application takes a round from all buckets of an optimizer at once
  kLatest,  // only the newest result, as in the paper on eager-SGD; older updates are lost
};

constexpr auto NamesOf(Missed /*type*/) { return std::array{"sum", "replay", "latest"}; }

class MissedResults {
 public:
  // The result of one round, or the sum of the results of several rounds.
  struct Result {
    Buffer sum;  // the sum of the results; without memory if they have no gradients
    int rounds = 0;
    int gradients = 0;
  };

  // With kReplay up to `limit` results are kept. When one more comes, the two oldest results are added up.
  explicit MissedResults(Missed mode, int limit = 1) : mode_(mode), limit_(mode == Missed::kReplay ? limit : 1) {}

  // Adds a missed result. May take the memory of `result`, and leave other memory of the same size there, or none.
  void Push(Buffer& result, int gradients, DataType type, std::size_t elements);
  // Adds a round without a result for this rank, so that the number of rounds stays right.
  void PushEmpty() { results_.push_back({{}, 1, 0}); }
  Result Pop();
  // Takes memory that Pop returned, to use it for the next result.
  void Recycle(Buffer storage) {
    if (spare_.empty()) spare_ = std::move(storage);
  }
  // Drops the contents of all results, but keeps the number of rounds.
  void MakeEmpty();
  void Clear() { results_.clear(); }
  // With kReplay: records that the application is taking the oldest results from all buckets of an optimizer, one
  // bucket after the other. Meanwhile no results are added up, because all buckets must give the same rounds.
  void BeTaken(bool being_taken) { being_taken_ = being_taken; }

  bool empty() const { return results_.empty(); }
  int rounds() const;     // the number of rounds in all results
  int gradients() const;  // the number of gradients in all results
  // The number of rounds in the oldest result.
  int oldest_rounds() const { return results_.empty() ? 0 : results_.front().rounds; }
  int summed() const { return summed_; }  // with kReplay: how many results were added to another result
  std::size_t bytes() const;

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
