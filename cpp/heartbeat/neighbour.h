// The process of another rank on this host.
#pragma once

#include <sys/types.h>

#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {

// Refers to the process itself and not to its number: when a process has ended, another one may get its number.
class Neighbour {
 public:
  // Kill does nothing if no process has this number, or if the kernel cannot refer to a process (before Linux 5.3).
  explicit Neighbour(pid_t number);

  // Ends the process by SIGKILL, even if it is stopped.
  void Kill() const;

 private:
  File process_;
};

}  // namespace horovod_partial::heartbeat
