// Heartbeats between the ranks. They do not depend on Horovod's cycle, which stops on all ranks if one rank is stopped.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "core/values/types.h"
#include "core/watch/activity.h"
#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {

using Seconds = std::chrono::duration<double>;

// `abort`: a rank may be silent for so long before the job ends. `stall`: ranks may wait for so long before the log
// tells of it. 0 means for ever.
struct Limits {
  Seconds abort{0};
  Seconds stall{0};
};

// The monitor's thread calls these. They must not hold it up.
struct Calls {
  // Called once, with the missing rank. On rank 0 the other ranks have been told before.
  std::function<void(Rank missing)> missing;
  // Returns what this rank does.
  std::function<Look()> look;
  // Tells of a wait. Logs `text`, unless that is empty. Then logs `doing`, what this rank does in that wait, with the
  // stacks of all its threads; unless `doing` is empty.
  std::function<void(const std::string& text, const std::string& doing)> tell;
};

// The monitor of one rank. Its thread sends a heartbeat ten times within the shorter limit, and hears the others'
// heartbeats. Rank 0 hears all other ranks, with what they do. It tells them which rank is missing, and when to write
// their stacks. The other ranks hear rank 0 only. A rank is not missing if its process has ended, or if it has stopped
// its monitor.
//
// The thread never waits for the application, nor for the interpreter. Only the thread uses the sockets. The
// application stops it through a file that wakes it. In a forked process there is no thread, and the monitor does
// nothing.
class Monitor {
 public:
  // Makes rank 0's monitor. Throws std::system_error if it cannot listen.
  static std::unique_ptr<Monitor> Listen(int size, const Limits& limits, Calls calls);
  // Makes another rank's monitor. `endpoint` is the text from rank 0's monitor. Throws std::runtime_error if rank 0
  // does not answer there.
  static std::unique_ptr<Monitor> Join(Rank rank, const Limits& limits, const std::string& endpoint, Calls calls);
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;
  ~Monitor();  // stops the thread

  // What other ranks need to join: port, secret and addresses, in one text. Empty on ranks other than 0.
  const std::string& endpoint() const { return endpoint_; }

  // This rank has come to its end: from now on it counts as waiting for nobody, and nobody as waiting for it. Whether
  // it lives is still watched.
  void Rest() { *rests_ = true; }

  // What the thread runs. Run returns by itself, or when `stop_file` becomes readable.
  class Watch {
   public:
    virtual ~Watch() = default;
    virtual void Run(int stop_file) = 0;
  };

 private:
  using Flag = std::shared_ptr<std::atomic<bool>>;
  Monitor(std::unique_ptr<Watch> watch, std::string endpoint, Flag rests);

  pid_t process_;  // the process that has the thread
  File stop_file_;
  std::string endpoint_;
  Flag rests_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace horovod_partial::heartbeat
