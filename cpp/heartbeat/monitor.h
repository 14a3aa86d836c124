// Signs of life between the ranks, beside Horovod's cycle, which stops on all ranks where one is stopped.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>

#include "core/types.h"
#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {

using Seconds = std::chrono::duration<double>;
// Called by the monitor's thread, once, with the missing rank; the others have been told by then.
using OnMissing = std::function<void(Rank missing)>;

// One rank's part: a thread that says ten times within the limit that this rank lives, and hears whether the others do.
// Rank 0 hears all others, and tells them who is missing; they hear rank 0. A rank whose process ends, or that stops
// its monitor, is missed by nobody.
//
// The thread never waits for the application, nor for the interpreter. Only it touches the sockets; the application's
// thread stops it through a file that wakes it. In a forked process there is no thread, and the monitor does nothing.
class Monitor {
 public:
  // Rank 0's. Throws std::system_error where it cannot listen.
  static std::unique_ptr<Monitor> Listen(int size, Seconds limit, OnMissing on_missing);
  // Another rank's, by the text that rank 0's monitor has for it. Throws std::runtime_error if no rank 0 answers there.
  static std::unique_ptr<Monitor> Join(Rank rank, Seconds limit, const std::string& endpoint, OnMissing on_missing);
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;
  ~Monitor();  // stops it

  // What other ranks need to join: port, secret and addresses, as text. Empty on other ranks than 0.
  const std::string& endpoint() const { return endpoint_; }

  // A part that the thread runs until it returns, or is told to stop by the file's being readable.
  class Watch {
   public:
    virtual ~Watch() = default;
    virtual void Run(int stop_file) = 0;
  };

 private:
  Monitor(std::unique_ptr<Watch> watch, std::string endpoint);

  pid_t process_;  // that the thread is in
  File stop_file_;
  std::string endpoint_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace horovod_partial::heartbeat
