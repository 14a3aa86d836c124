// What all parts of an engine (one rank's buckets, flush and waits) use: clock, collectives, owners, wake-up calls.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "core/values/types.h"
#include "engine/collectives.h"
#include "engine/farewell.h"
#include "engine/possible_arrivals.h"
#include "recording/recorder.h"

namespace horovod_partial {

// Thrown when a bucket or Horovod has failed or shut down. In Python it becomes HorovodInternalError.
struct EngineError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Tells whether a waiting thread has something else to do. Called any number of times, while no bucket's lock is held.
using IsDue = std::function<bool()>;

// How long a waiting thread sleeps before it checks its condition again, so that it does not hang if a wake-up is lost.
// With `is_due` it checks each millisecond, like Horovod's own waits, because something else may become due.
inline std::chrono::milliseconds PatienceOf(const IsDue& is_due) { return std::chrono::milliseconds(is_due ? 1 : 100); }

// The time by the monotonic clock, for all waits, reports and records.
inline Time Now() { return std::chrono::steady_clock::now().time_since_epoch(); }

// Counts changes, for threads that wait for one of several things: for the end of a flush or a round, or for a
// micro-batch that they may begin. Any thread may call the functions of this class, even with another lock held.
class Changes {
 public:
  void Tell() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  std::uint64_t count() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }
  // Blocks until the count differs from `seen` (returns true), or until `patience` has passed (returns false).
  bool Await(std::uint64_t seen, std::chrono::milliseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, patience, [&] { return count_ != seen; });
  }

 private:
  mutable std::mutex mutex_;  // this mutex guards the count; no other lock is taken while it is held
  std::condition_variable changed_;
  std::uint64_t count_ = 0;
};

struct Surroundings {
  Collectives& collectives;
  const Rank rank;
  const int size;
  const void* const engine;  // the address of the Engine object, by which PossibleArrivals tells process sets apart
  const std::shared_ptr<PossibleArrivals> arrivals;
  const std::shared_ptr<FirstFailure> first_failure;

  // `recorder` and `process_set` are set by Engine::SetUp, before any other use of this object.
  std::shared_ptr<recording::Recorder> recorder{};
  int process_set = 0;  // the number of this process set in the recording

  // The next members are atomic: Horovod's background thread uses them in its cycles, and must not wait for the
  // application.
  std::atomic<bool> news{false};         // true if this rank has something to report
  std::atomic<Time> reported{Time(0)};   // when this rank built its last report
  std::atomic<int> awaited{0};           // the number of contributions that a device still computes
  std::atomic<bool> shares_work{false};  // true if this process set has a bucket with work sharing
  std::atomic<int> in_use{0};            // how many buckets a flush waits for: they have had a round and not ended
  Changes changes{};

  // Returns the recorder if it notes anything, else null.
  recording::Recorder* Recording() const { return recorder != nullptr && recorder->on() ? recorder.get() : nullptr; }
  // Throws EngineError because Horovod has shut down. The text says why, as far as this rank knows.
  [[noreturn]] void ThrowShutDown() const;
};

// The Python object for which a bucket exists on this rank, such as an optimizer. When the object is destroyed, this
// rank reports that it does not use its buckets any more (docs/protocol.md, rule 11).
class Owner {
 public:
  // A garbage collector may call Leave on any thread, under any lock. So Leave takes no lock and allocates no memory.
  void Leave();
  bool gone() const { return gone_; }
  // Returns how many owners of buckets in this process are gone. When this changes, the rank has something to report.
  static std::uint64_t Departures();

 private:
  std::atomic<bool> gone_{false};
};

}  // namespace horovod_partial
