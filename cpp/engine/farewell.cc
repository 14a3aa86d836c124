#include "engine/farewell.h"

#include <utility>

namespace horovod_partial {

void Farewell::Say(const std::string& failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  unsaid_ = failure;
}

void Farewell::AwaitSaid(std::chrono::milliseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  said_.wait_for(lock, patience, [this] { return unsaid_.empty(); });
}

std::string Farewell::TakeUnsaid() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!unsaid_.empty()) said_.notify_all();
  return std::exchange(unsaid_, "");
}

void FirstFailure::Hear(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (heard_.empty()) heard_ = text;
}

void FirstFailure::HearOfDeadlock(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  deadlock_ = text;
  ++deadlocks_;
}

std::string FirstFailure::LastDeadlock() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return deadlock_;
}

void FirstFailure::Forget() {
  std::lock_guard<std::mutex> lock(mutex_);
  heard_.clear();
}

std::string FirstFailure::Explain(const std::string& reason) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return heard_.empty() ? reason : heard_ + ". " + reason;
}

}  // namespace horovod_partial
