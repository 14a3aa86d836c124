#include "attach/cycle_record.h"

#include <algorithm>

#include "attach/envelope.h"
#include "engine/surroundings.h"

namespace horovod_partial::attach {

void CycleRecord::Handed(Time now) {
  if (!recorder_->on()) return;
  std::size_t there;
  {
    auto& queue = QueueAccess::Of(controller_);
    std::lock_guard<std::mutex> lock(queue.mutex_);
    there = queue.tensor_table_.size() - queue.tensor_table_.count(JOIN_TENSOR_NAME);
  }
  if (there > known_) recorder_->Handed(now);
  known_ = there;
}

void CycleRecord::Reduced(const std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response, Time begin,
                          bool everyone) {
  const std::int64_t sequence = sequence_++;
  if (!recorder_->on()) return;
  const bool ours = IsOurs(response);
  const auto& names = response.tensor_names();
  const bool trains = !ours && !std::all_of(names.begin(), names.end(), IsAgreement);
  if (!ours) {
    // On a rank that has joined, Horovod adds entries of zeros, which nobody has submitted.
    const auto submitted = std::count_if(entries.begin(), entries.end(),
                                         [](const hvd::TensorTableEntry& entry) { return entry.callback != nullptr; });
    known_ -= std::min(known_, static_cast<std::size_t>(submitted));
  }
  std::int64_t bytes = 0;
  for (const auto& entry : entries) bytes += static_cast<std::int64_t>(entry.tensor->size());
  recorder_->Reduced({sequence, process_set_id_, trains ? &names : nullptr, begin, Now(), bytes, everyone});
}

void CycleRecord::Decided(const std::vector<Closing>& closings, const Coordination& coordination, Time now) const {
  if (!recorder_->records()) return;
  for (const Closing& closing : closings) {
    if (!closing.error.empty()) continue;
    const Declaration& declaration = coordination.declaration(closing.bucket);
    const Policy& policy = declaration.policy;
    const int quorum = policy.rule == Policy::Rule::kReady ? policy.group_size : policy.quorum;
    const std::size_t bytes = ElementsOf(declaration.shape) * SizeOf(declaration.type);
    recorder_->Decided({process_set_id_, closing.bucket, policy.description, bytes}, closing, quorum, now);
  }
}

}  // namespace horovod_partial::attach
