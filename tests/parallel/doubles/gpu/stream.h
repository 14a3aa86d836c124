// A double of a GPU's stream.
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

namespace horovod_partial {

// A thread that does what is queued, in order and each piece after a while: who does not wait finds what was there
// before. Both libraries of the double use it, by this header: TensorFlow's plugin makes it, the attachment queues on
// it.
class DoubleStream {
 public:
  DoubleStream() : thread_([this] { Run(); }) {}
  DoubleStream(const DoubleStream&) = delete;
  DoubleStream& operator=(const DoubleStream&) = delete;
  ~DoubleStream() {
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

 private:
  static constexpr int kLongestDelay = 200;  // microseconds

  void Run() {
    std::mt19937 random;
    std::uniform_int_distribution<int> delay(0, kLongestDelay);
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return ends_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(delay(random)));
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  mutable std::mutex mutex_;  // guards all but the thread
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t queued_ = 0;
  std::uint64_t done_ = 0;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace horovod_partial
