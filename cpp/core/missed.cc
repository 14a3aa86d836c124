#include "core/missed.h"

#include <utility>

namespace horovod_partial {

void MissedResults::Push(Buffer& result, DataType type, std::size_t elements) {
  ++rounds_;
  const bool append = results_.empty() || (mode_ == Missed::kReplay && results_.size() < kReplayDepth);
  if (append) {
    results_.push_back(std::move(spare_));
    spare_ = {};
    std::swap(results_.back(), result);
    return;
  }
  switch (mode_) {
    case Missed::kSum: result.memory().Add(type, results_.front().data(), result.data(), elements); break;
    case Missed::kLatest: std::swap(results_.front(), result); break;
    case Missed::kReplay: {
      result.memory().Add(type, results_[1].data(), results_[0].data(), elements);
      Buffer oldest = std::move(results_.front());
      results_.pop_front();
      std::swap(oldest, result);
      results_.push_back(std::move(oldest));
      break;
    }
  }
}

std::deque<Buffer> MissedResults::Take() {
  rounds_ = 0;
  return std::exchange(results_, {});
}

void MissedResults::Clear() {
  rounds_ = 0;
  results_.clear();
}

std::size_t MissedResults::bytes() const {
  std::size_t total = spare_.size();
  for (const auto& result : results_) total += result.size();
  return total;
}

}  // namespace horovod_partial
