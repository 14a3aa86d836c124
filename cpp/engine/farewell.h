// What a rank that fails says to the others before it leaves, so that they can tell their users why they end.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

namespace horovod_partial {

// One rank's part, in one process set.
class Farewell {
 public:
  // In closings that bring a farewell: no bucket has this name.
  static constexpr const char* kBucket = "horovod_partial.farewell";

  // The application's thread, on the rank that fails: the next report is to say why.
  void Say(const std::string& failure);
  // Blocks until that report has been made, for so long at most.
  void AwaitSaid(std::chrono::milliseconds patience);
  // The background thread: what has not been said yet.
  std::string TakeUnsaid();
  // The background thread: which rank has failed, and why.
  void Hear(const std::string& text);
  // Any thread: why Horovod has shut down, with what was heard.
  std::string Explain(const std::string& reason) const;

 private:
  mutable std::mutex mutex_;  // guards all that follows, and is held for no longer than a copy takes
  std::condition_variable said_;
  std::string unsaid_;
  std::string heard_;
};

}  // namespace horovod_partial
