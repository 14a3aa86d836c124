// Heartbeats between the ranks. They do not depend on Horovod's cycle, which stops on all ranks if one rank is stopped.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/slowness/step_timer.h"
#include "core/values/types.h"
#include "core/watch/activity.h"
#include "core/watch/slow_watch.h"
#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {

using Seconds = std::chrono::duration<double>;

// How long a rank may give no heartbeat before the job ends (`abort`), and how long a rank may wait for other ranks
// before the wait is logged (`stall`). 0 means for ever.
struct Limits {
  Seconds abort{0};
  Seconds stall{0};
};

// Functions that the monitor's thread calls. They must return soon, because no heartbeat is sent meanwhile.
struct Calls {
  // Called once, when a rank gives no heartbeat for too long. Rank 0 tells the other ranks before it calls this.
  std::function<void(Rank missing)> missing;
  // Returns what this rank does: it computes, waits for other ranks, or has ended.
  std::function<Look()> look;
  // Returns a report of this rank's training steps since the last call, or nothing while steps are not watched.
  std::function<std::optional<StepReport>()> steps = [] { return std::nullopt; };
  // Called on rank 0 just before it logs that a wait has lasted too long.
  std::function<void()> explains = [] {};
  // Called when something must be logged: a wait has lasted too long or is over, or a rank is slow. Logs `text` unless
  // it is empty. Then, unless `doing` is empty, logs `doing` (what this rank does) and the stacks of all its threads.
  std::function<void(const std::string& text, const std::string& doing)> tell;
};

// The monitor of one rank. Its thread sends ten heartbeats in the time of Limits::abort or Limits::stall, whichever is
// shorter, and receives heartbeats. All ranks but rank 0 exchange heartbeats with rank 0 only, and tell it what they
// do. Rank 0 tells the others which rank has given no heartbeat for too long, and when they must write their stacks. A
// rank that has ended or has stopped its monitor need not give heartbeats. If steps are watched, each rank reports how
// long its steps took, at least once a second, and rank 0 logs which ranks are slow.
//
// The monitor's thread never waits for the application or the interpreter. Only this thread uses the sockets. To stop
// it, the destructor writes to `stop_file_`. A forked process has no such thread, and its monitor does nothing.
class Monitor : private NonCopyable {
 public:
  // Makes the monitor of rank 0. Throws std::system_error if rank 0 cannot listen on a port.
  static std::unique_ptr<Monitor> Listen(int size, const Limits& limits, Calls calls);
  // Makes the monitor of another rank. `endpoint` is what endpoint() returns on rank 0. Throws std::runtime_error if
  // rank 0 does not answer at any address in it.
  static std::unique_ptr<Monitor> Join(Rank rank, const Limits& limits, const std::string& endpoint, Calls calls);
  ~Monitor();

  // The port, the secret and the addresses that other ranks need to join, in one text. Empty on ranks other than 0.
  const std::string& endpoint() const { return endpoint_; }

  // Called when this rank has come to its end. From now on it counts as waiting for nobody, and nobody counts as
  // waiting for it. Its heartbeats go on, so other ranks still notice if it is stopped.
  void Rest() { *rests_ = true; }

  // On rank 0: what is known of each rank whose steps are watched. Empty on the other ranks. Any thread may call this.
  std::vector<WatchedRank> Ranks() const { return watch_->Ranks(); }

  // What the monitor's thread runs. Run returns if a rank gives no heartbeat for too long, rank 0 has ended, or
  // `stop_file` is readable.
  class Watch {
   public:
    virtual ~Watch() = default;
    virtual void Run(int stop_file) = 0;
    // Called by other threads while Run runs.
    virtual std::vector<WatchedRank> Ranks() const { return {}; }
  };

 private:
  using Flag = std::shared_ptr<std::atomic<bool>>;
  Monitor(std::shared_ptr<Watch> watch, std::string endpoint, Flag rests);

  pid_t process_;  // the process in which the monitor's thread runs
  File stop_file_;
  std::string endpoint_;
  Flag rests_;
  std::shared_ptr<Watch> watch_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace horovod_partial::heartbeat
