#include "attach/outstanding.h"

#include "attach/envelope.h"

namespace horovod_partial::attach {

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
  bool still_there = false;
  const hvd::TensorTable::value_type* other = nullptr;
  const auto watched = context_.lock();
  for (const std::int32_t id : state.process_set_table.Ids()) {
    auto& queue = QueueAccess::Of(*state.process_set_table.Get(id).controller);
    std::lock_guard<std::mutex> lock(queue.mutex_);
    for (const auto& row : queue.tensor_table_) {
      if (IsOurs(row.first)) continue;
      other = &row;
      still_there = still_there || (row.first == name_ && row.second.context == watched);
    }
    if (!still_there && other != nullptr) {
      name_ = other->first;
      context_ = other->second.context;
      since_ = now;
      ++changes_;
      return now;
    }
  }
  if (!still_there) {
    changes_ += name_.empty() ? 0 : 1;
    name_.clear();
    context_.reset();
    since_ = kNever;
  }
  return since_;
}

std::vector<PossibleArrivals::Collective> OutstandingWatch::All(hvd::HorovodGlobalState& state) {
  std::vector<PossibleArrivals::Collective> outstanding;
  for (const std::int32_t id : state.process_set_table.Ids()) {
    auto& queue = QueueAccess::Of(*state.process_set_table.Get(id).controller);
    std::lock_guard<std::mutex> lock(queue.mutex_);
    for (const auto& row : queue.tensor_table_)
      if (!IsOurs(row.first)) outstanding.push_back({row.first, row.second.context});
  }
  return outstanding;
}

}  // namespace horovod_partial::attach
