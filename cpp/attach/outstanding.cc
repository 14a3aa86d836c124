#include "attach/outstanding.h"

#include <optional>

#include "attach/envelope.h"

namespace horovod_partial::attach {
namespace {

// Calls `see` with each collective of Horovod's own that is outstanding, while Horovod's lock of it is held.
template <class See>
void ForEach(hvd::HorovodGlobalState& state, const See& see) {
  for (const std::int32_t id : state.process_set_table.Ids()) {
    auto& queue = QueueAccess::Of(*state.process_set_table.Get(id).controller);
    std::lock_guard<std::mutex> lock(queue.mutex_);
    for (const auto& row : queue.tensor_table_)
      if (!IsOurs(row.first)) see(row);
  }
}

}  // namespace

std::string Outstanding::Find() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (left_) return "";
  const std::unique_lock<std::mutex> queue_lock(queue_.mutex_, std::try_to_lock);
  if (!queue_lock.owns_lock()) return found_;
  const auto& table = queue_.tensor_table_;
  if (table.count(JOIN_TENSOR_NAME) > 0) return found_ = JOIN_TENSOR_NAME;
  if (table.count(found_) > 0) return found_;
  found_.clear();
  for (const auto& row : table)
    if (!IsOurs(row.first)) found_ = row.first;
  return found_;
}

void Outstanding::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  left_ = true;
}

Time OutstandingWatch::Since(hvd::HorovodGlobalState& state, Time now) {
  const auto watched = context_.lock();
  bool still_there = false;
  std::optional<PossibleArrivals::Collective> other;
  ForEach(state, [&](const hvd::TensorTable::value_type& row) {
    if (row.first == name_ && row.second.context == watched) still_there = true;
    if (!other) other = {row.first, row.second.context};
  });
  if (still_there || (name_.empty() && !other)) return since_;
  name_ = other ? other->name : "";
  context_ = other ? other->context : std::weak_ptr<const void>();
  since_ = other ? now : kNever;
  ++changes_;
  return since_;
}

std::vector<PossibleArrivals::Collective> OutstandingWatch::All(hvd::HorovodGlobalState& state) {
  std::vector<PossibleArrivals::Collective> outstanding;
  ForEach(state, [&](const auto& row) { outstanding.push_back({row.first, row.second.context}); });
  return outstanding;
}

}  // namespace horovod_partial::attach
