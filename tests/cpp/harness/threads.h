// Threads under a script: of the ranks' application threads one moves at a time, and which one, and for how long, is
// drawn from a seed, so that a run can be repeated. Only while an engine makes a thread wait, it is the engine's.
#pragma once

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "harness/fake_horovod.h"

namespace horovod_partial::test {

// Ends the process, with a message, if it lives longer than it should: no test can hang.
class Watchdog {
 public:
  explicit Watchdog(std::string message, std::chrono::seconds limit = std::chrono::seconds(300))
      : thread_([this, message = std::move(message), limit] {
          std::unique_lock<std::mutex> lock(mutex_);
          if (changed_.wait_for(lock, limit, [this] { return over_; })) return;
          std::fprintf(stderr, "A test hangs: %s\n", message.c_str());
          std::abort();
        }) {}
  ~Watchdog() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

class Script {
 public:
  explicit Script(std::uint64_t seed) : random_(seed) {}
  ~Script() {
    for (auto& actor : actors_) actor->thread.join();
  }

  Random& random() { return random_; }

  // A thread that does not move before its first turn. All of them must have come to their end when the script does.
  void Spawn(std::function<void()> body) {
    actors_.push_back(std::make_unique<Actor>());
    Actor& actor = *actors_.back();
    actor.thread = std::thread([this, &actor, body = std::move(body)] {
      actor.Identify();
      current_ = &actor;
      Park();
      body();
      std::lock_guard<std::mutex> lock(mutex_);
      actor.state = State::kDone;
      changed_.notify_all();
    });
    WaitForRest(actor);
  }

  // --- The spawned threads

  // Another thread may be next.
  void Yield() { Park(); }

  // Calls `wait`, which may block until the background does something.
  void Block(const std::function<void()>& wait) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      current_->state = State::kBlocked;
      changed_.notify_all();
    }
    try {
      wait();
    } catch (...) {
      Park();
      throw;
    }
    Park();
  }

  // --- The thread that made the script, and drives the background

  std::size_t ends() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<std::size_t>(
        std::count_if(actors_.begin(), actors_.end(), [](const auto& actor) { return actor->state == State::kDone; }));
  }
  bool Done() const { return ends() == actors_.size(); }

  // Lets a random number of threads take a turn, one after the other.
  void Interleave() {
    for (int turns = Below(random_, 3); turns > 0; --turns)
      if (!TakeTurn()) return;
  }

  // Lets a random thread that can move take a turn; false if there is none.
  bool TakeTurn() {
    std::vector<Actor*> ready;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& actor : actors_)
        if (actor->state == State::kParked) ready.push_back(actor.get());
    }
    if (ready.empty()) return false;
    Actor& actor = *ready[static_cast<std::size_t>(Below(random_, static_cast<int>(ready.size())))];
    {
      std::lock_guard<std::mutex> lock(mutex_);
      actor.state = State::kMoving;
    }
    actor.turn.notify_all();
    WaitForRest(actor);
    return true;
  }

  // Until every thread that the engine has woken up is here again, or waits for something else. Without it a run would
  // depend on how quickly a thread wakes up.
  void Settle() {
    for (auto& actor : actors_) WaitForRest(*actor);
  }

 private:
  enum class State : std::uint8_t {
    kMoving,
    kParked,   // waits for its turn
    kBlocked,  // in the engine
    kDone,
  };
  struct Actor {
    // Where the system says whether this thread sleeps. Without that file a run still is right, but cannot be repeated.
    void Identify() {
      const std::string path = "/proc/self/task/" + std::to_string(::syscall(SYS_gettid)) + "/stat";
      stat_file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    }
    bool Sleeps() const {
      char text[128];
      const auto size = stat_file < 0 ? 0 : ::pread(stat_file, text, sizeof text - 1, 0);
      if (size <= 0) return true;
      const std::string line(text, static_cast<std::size_t>(size));
      const std::size_t name_end = line.rfind(')');
      return name_end == std::string::npos || line.compare(name_end, 3, ") S") == 0;
    }
    ~Actor() {
      if (stat_file >= 0) ::close(stat_file);
    }

    State state = State::kMoving;
    std::condition_variable turn;
    std::atomic<int> stat_file{-1};
    std::thread thread;
  };

  void Park() {
    std::unique_lock<std::mutex> lock(mutex_);
    current_->state = State::kParked;
    changed_.notify_all();
    current_->turn.wait(lock, [] { return current_->state == State::kMoving; });
  }

  void WaitForRest(Actor& actor) {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return actor.state != State::kMoving; });
        if (actor.state != State::kBlocked) return;
      }
      if (actor.Sleeps()) return;  // in the engine, or it has just been parked
      std::this_thread::yield();
    }
  }

  static inline thread_local Actor* current_ = nullptr;

  mutable std::mutex mutex_;  // guards the actors' states
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Actor>> actors_;
  Random random_;
};

}  // namespace horovod_partial::test
