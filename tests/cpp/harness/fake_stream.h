// A make-believe stream of a device, for the C++ tests and for the double of a GPU in tests/parallel.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

namespace horovod_partial::test {

// A thread that does what is queued, in order and each piece after a while: who does not wait finds what was there
// before.
class FakeStream {
 public:
  explicit FakeStream(std::uint64_t seed = 1) : random_(seed), thread_([this] { Run(); }) {}
  FakeStream(const FakeStream&) = delete;
  FakeStream& operator=(const FakeStream&) = delete;
  ~FakeStream() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // The work's number: the first has 1.
  std::uint64_t Queue(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_all();
    return ++queued_;
  }
  std::uint64_t queued() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return queued_;
  }
  // Whether the work of this number, and all before it, is done.
  bool Done(std::uint64_t number) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= number;
  }
  void Wait(std::uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }
  void WaitForAll() { Wait(queued()); }

 private:
  static constexpr int kLongestDelay = 50;  // microseconds

  void Run() {
    std::uniform_int_distribution<int> delay(0, kLongestDelay);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return ends_ || !queue_.empty(); });
      if (queue_.empty()) return;
      auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(delay(random_)));
      work();
      work = nullptr;
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;  // guards what follows, up to the numbers' source
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t queued_ = 0;
  std::uint64_t done_ = 0;
  bool ends_ = false;
  std::mt19937_64 random_;  // used by the thread alone
  std::thread thread_;
};

}  // namespace horovod_partial::test
