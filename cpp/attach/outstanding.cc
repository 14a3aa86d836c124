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

}  // namespace horovod_partial::attach
