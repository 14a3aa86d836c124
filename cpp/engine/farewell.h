// What a rank that fails says to the others before it leaves, so that they can tell their users why they end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>

namespace horovod_partial {

// What this rank has to say. Only the process set of all ranks is told: there each rank has the number that users know.
class Farewell {
 public:
  // In closings with an error that bring a farewell. What users do in a bucket of this name is no farewell.
  static constexpr const char* kBucket = "horovod_partial.farewell";

  // The application's thread, on the rank that fails: the next report is to say why.
  void Say(const std::string& failure);
  // Blocks until that report has been made, for so long at most.
  void AwaitSaid(std::chrono::milliseconds patience);
  // The background thread: what has not been said yet.
  std::string TakeUnsaid();

 private:
  std::mutex mutex_;  // guards all that follows, and is held for no longer than a copy takes
  std::condition_variable said_;
  std::string unsaid_;
};

// What this process has heard: for the engines of all process sets, whose operations all fail.
class FirstFailure {
 public:
  // The name of the bucket whose closing tells that ranks wait for each other, in whatever process sets.
  static constexpr const char* kDeadlock = "horovod_partial.deadlock";

  // The background thread: which rank has failed, and why. What comes later is a consequence.
  void Hear(const std::string& text);
  // Ranks wait for each other: every wait of this process ends with this text. The process goes on. deadlocks() counts.
  void HearOfDeadlock(const std::string& text);
  std::uint64_t deadlocks() const { return deadlocks_; }
  std::string LastDeadlock() const;
  // Horovod is initialised anew.
  void Forget();
  // Any thread: why Horovod has shut down, with what was heard.
  std::string Explain(const std::string& reason) const;

 private:
  mutable std::mutex mutex_;  // guards the texts
  std::string heard_;
  std::string deadlock_;
  std::atomic<std::uint64_t> deadlocks_{0};
};

}  // namespace horovod_partial
