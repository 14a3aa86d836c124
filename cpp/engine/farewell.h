// The last message of a rank that fails. It lets other ranks tell their users why the job ends.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

namespace horovod_partial {

// This rank's message that its application fails. Sent in the process set of all ranks: users know its rank numbers.
class Farewell {
 public:
  // The coordinator tells all ranks of a failed rank by a Closing with this bucket name and an error. A Closing with
  // this name and no error belongs to a bucket of the user.
  static constexpr const char* kBucket = "horovod_partial.farewell";

  // Puts `failure` into the next report. Called on a thread of the application when the application fails.
  void Say(const std::string& failure) {
    std::lock_guard<std::mutex> lock(mutex_);
    unsaid_ = failure;
  }
  // Blocks until the failure has been reported, but no longer than `patience`.
  void AwaitSaid(std::chrono::milliseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    said_.wait_for(lock, patience, [this] { return unsaid_.empty(); });
  }
  // Returns the text of the failure if it has not been reported, and forgets the text. Called on the background thread.
  std::string TakeUnsaid() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!unsaid_.empty()) said_.notify_all();
    return std::exchange(unsaid_, "");
  }

 private:
  std::mutex mutex_;  // this mutex guards the members below
  std::condition_variable said_;
  std::string unsaid_;
};

// What this process knows of failures. All process sets share it, because a failure in one ends the operations of all.
class FirstFailure {
 public:
  // The bucket name by which the coordinator reports a deadlock (ranks wait for each other, maybe across process sets).
  static constexpr const char* kDeadlock = "horovod_partial.deadlock";

  // Keeps the text of the first failure. Later failures are only consequences of it. Called on the background thread.
  void Hear(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (heard_.empty()) heard_ = text;
  }
  // Records a deadlock. Each wait of this process then ends with `text` as its error, but the process goes on.
  // deadlocks() returns how many deadlocks there were.
  void HearOfDeadlock(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    deadlock_ = text;
    ++deadlocks_;
  }
  std::uint64_t deadlocks() const { return deadlocks_; }
  std::string LastDeadlock() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return deadlock_;
  }
  // Forgets the first failure, because Horovod is initialised again.
  void Forget() {
    std::lock_guard<std::mutex> lock(mutex_);
    heard_.clear();
  }
  // Returns `reason`, after the text of the first failure if there was one. Any thread may call this.
  std::string Explain(const std::string& reason) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return heard_.empty() ? reason : heard_ + ". " + reason;
  }

 private:
  mutable std::mutex mutex_;  // this mutex guards heard_ and deadlock_
  std::string heard_;
  std::string deadlock_;
  std::atomic<std::uint64_t> deadlocks_{0};
};

}  // namespace horovod_partial
