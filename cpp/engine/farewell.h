// The last message of a rank that fails. With it the other ranks can tell their users why the job ends.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>

namespace horovod_partial {

// The message of this rank. Only the process set of all ranks gets it: there each rank has the number that users know.
class Farewell {
 public:
  // The bucket name in a closing whose error is the message. A user's bucket of this name carries no message.
  static constexpr const char* kBucket = "horovod_partial.farewell";

  // Application's thread, on the rank that fails: the next report is to carry this text.
  void Say(const std::string& failure);
  // Blocks until that report has been made, but no longer than `patience`.
  void AwaitSaid(std::chrono::milliseconds patience);
  // Background thread: returns the text that has not been reported yet, or an empty one, and forgets it.
  std::string TakeUnsaid();

 private:
  std::mutex mutex_;  // guards the members below
  std::condition_variable said_;
  std::string unsaid_;
};

// What this process has heard of failures. The engines of all process sets share it, because all their operations fail.
class FirstFailure {
 public:
  // The bucket name in a closing that reports a deadlock: ranks wait for each other, in one or several process sets.
  static constexpr const char* kDeadlock = "horovod_partial.deadlock";

  // Background thread: keeps the text of the first failure. Later failures are only consequences of it.
  void Hear(const std::string& text);
  // The ranks wait for each other. Every wait of this process ends with this text, but the process goes on. deadlocks()
  // counts these events.
  void HearOfDeadlock(const std::string& text);
  std::uint64_t deadlocks() const { return deadlocks_; }
  std::string LastDeadlock() const;
  // Call it when Horovod is initialised again.
  void Forget();
  // Any thread: returns `reason`, with the text of the first failure before it, if there is one.
  std::string Explain(const std::string& reason) const;

 private:
  mutable std::mutex mutex_;  // guards the texts
  std::string heard_;
  std::string deadlock_;
  std::atomic<std::uint64_t> deadlocks_{0};
};

}  // namespace horovod_partial
