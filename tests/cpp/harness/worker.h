// A real thread, for what asks which thread it runs on.
#pragma once

#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

namespace horovod_partial::test {

// A thread that lives until its object ends, and does one thing at a time.
class Worker {
 public:
  Worker() : thread_([this] { Run(); }) {}
  ~Worker() {
    Do([this] { ends_ = true; });
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Returns when it is done.
  void Do(std::function<void()> body) {
    std::promise<void> done;
    Job job{std::move(body), &done};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
    }
    changed_.notify_one();
    done.get_future().wait();
  }

 private:
  struct Job {
    std::function<void()> body;
    std::promise<void>* done;
  };
  void Run() {
    while (!ends_) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return job_ != nullptr; });
      Job job = *std::exchange(job_, nullptr);
      job.body();
      job.done->set_value();
    }
  }

  bool ends_ = false;  // touched by the thread alone
  Job* job_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace horovod_partial::test
