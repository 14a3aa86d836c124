// How much processor time this process gets, as far as Linux reports it, and how to kill another process of this host.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "core/watch/activity.h"
#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {

// Measures what may slow this process down. Used by one thread.
class Machine {
 public:
  // Returns measurements of the time since the last call. The first call returns unknown values.
  MachineSigns Look();

 private:
  // Times since the start of the machine or the process, in seconds, and counts. Below 0 if Linux does not report them.
  struct Counters {
    double now = 0;
    double used = -1;       // processor time of this process
    double stolen = -1;     // processor time that the hypervisor gave to other virtual machines, over all processors
    double processors = 1;  // the number of processors of the machine
    double periods = -1;    // the number of scheduling periods of this process's cgroup
    double throttled = -1;  // the number of these periods in which the cgroup was throttled
    double waited = -1;     // how long some process of the machine has waited for a processor
  };
  Counters Read() const;

  std::string cgroup_;  // the file that counts the scheduling periods of this process's cgroup; empty for none
  std::optional<Counters> last_;
};

// The process of another rank on this host. This class holds a pidfd, a file descriptor that refers to one process for
// ever. The number of a process does not: when the process has ended, Linux may give its number to another one.
class Neighbour {
 public:
  // `number`: the number of the process. If no process has this number, or if Linux has no pidfds (before version 5.3),
  // Kill does nothing.
  explicit Neighbour(pid_t number);

  // Ends the process by SIGKILL, even if it is stopped.
  void Kill() const;

 private:
  File process_;
};

}  // namespace horovod_partial::heartbeat
