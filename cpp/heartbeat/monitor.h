// Signs of life between the ranks, beside Horovod's cycle, which stops on all ranks where one is stopped.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "core/activity.h"
#include "core/types.h"
#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {

using Seconds = std::chrono::duration<double>;

// How long a rank may be silent before the job ends, and how long ranks may wait before that is told; 0 for ever.
struct Limits {
  Seconds abort{0};
  Seconds stall{0};
};

// All called by the monitor's thread, which must not be held up.
struct Calls {
  // Once, with the missing rank; the others have been told by then.
  std::function<void(Rank missing)> missing;
  // What this rank does.
  std::function<Look()> look;
  // What is to be told of a wait: to the log, unless it is empty; then, unless that is empty, what this rank does in
  // it, with the stacks of all its threads.
  std::function<void(const std::string& text, const std::string& doing)> tell;
};

// One rank's part: a thread that says ten times within the shorter limit that this rank lives, and what it does, and
// hears whether the others live. Rank 0 hears all others, and tells them who is missing, and when to write their
// stacks; they hear rank 0. A rank whose process ends, or that stops its monitor, is missed by nobody.
//
// The thread never waits for the application, nor for the interpreter. Only it touches the sockets; the application's
// thread stops it through a file that wakes it. In a forked process there is no thread, and the monitor does nothing.
class Monitor {
 public:
  // Rank 0's. Throws std::system_error where it cannot listen.
  static std::unique_ptr<Monitor> Listen(int size, const Limits& limits, Calls calls);
  // Another rank's, by the text that rank 0's monitor has for it. Throws std::runtime_error if no rank 0 answers there.
  static std::unique_ptr<Monitor> Join(Rank rank, const Limits& limits, const std::string& endpoint, Calls calls);
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;
  ~Monitor();  // stops it

  // What other ranks need to join: port, secret and addresses, as text. Empty on other ranks than 0.
  const std::string& endpoint() const { return endpoint_; }

  // This rank has come to its end: from now on it misses nobody in a wait, and nobody misses it there. Whether it lives
  // is watched on.
  void Rest() { *rests_ = true; }

  // A part that the thread runs until it returns, or is told to stop by the file's being readable.
  class Watch {
   public:
    virtual ~Watch() = default;
    virtual void Run(int stop_file) = 0;
  };

 private:
  using Flag = std::shared_ptr<std::atomic<bool>>;
  Monitor(std::unique_ptr<Watch> watch, std::string endpoint, Flag rests);

  pid_t process_;  // that the thread is in
  File stop_file_;
  std::string endpoint_;
  Flag rests_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace horovod_partial::heartbeat
