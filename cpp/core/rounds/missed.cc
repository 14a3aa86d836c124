#include "core/rounds/missed.h"

#include <utility>

namespace horovod_partial {

void MissedResults::Push(Buffer& result, int gradients, DataType type, std::size_t elements) {
  if (mode_ == Missed::kReplay && !being_taken_) MakeRoom(type, elements);
  if (being_taken_ || static_cast<int>(results_.size()) < limit_) {
    results_.push_back({std::exchange(spare_, {}), 1, gradients});
    std::swap(results_.back().sum, result);
    return;
  }
  Result& only = results_.front();
  ++only.rounds;
  if (only.gradients == 0 || mode_ == Missed::kLatest) {
    std::swap(only.sum, result);
    only.gradients = gradients;
  } else {
    result.memory().Add(type, only.sum.data(), result.data(), elements);
    only.gradients += gradients;
  }
}

// Adds up the two oldest results until there is room for another result. There may be more results than the limit:
// PushEmpty makes no room, and Push makes none while the oldest results are being taken.
void MissedResults::MakeRoom(DataType type, std::size_t elements) {
  while (static_cast<int>(results_.size()) >= limit_ && results_.size() > 1) {
    Result oldest = Pop();
    Result& next = results_.front();
    next.rounds += oldest.rounds;
    summed_ += next.gradients > 0 && oldest.gradients > 0 ? 1 : 0;
    if (next.gradients == 0) {
      std::swap(next.sum, oldest.sum);
    } else if (oldest.gradients > 0) {
      oldest.sum.memory().Add(type, next.sum.data(), oldest.sum.data(), elements);
    }
    next.gradients += oldest.gradients;
    Recycle(std::move(oldest.sum));
  }
}

MissedResults::Result MissedResults::Pop() {
  Result oldest = std::move(results_.front());
  results_.pop_front();
  return oldest;
}

void MissedResults::MakeEmpty() {
  for (Result& result : results_) result = {{}, result.rounds, 0};
}

int MissedResults::rounds() const {
  int rounds = 0;
  for (const Result& result : results_) rounds += result.rounds;
  return rounds;
}

int MissedResults::gradients() const {
  int gradients = 0;
  for (const Result& result : results_) gradients += result.gradients;
  return gradients;
}

std::size_t MissedResults::bytes() const {
  std::size_t total = spare_.size();
  for (const Result& result : results_) total += result.sum.size();
  return total;
}

}  // namespace horovod_partial
