// Another rank's process on this host.
#pragma once

#include <sys/types.h>

#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {

// Refers to the process itself. A process number may be given to another process when this one has ended.
class Neighbour {
 public:
  // If the kernel cannot refer to processes so (before Linux 5.3), or if no process has this number, `Kill` does
  // nothing.
  explicit Neighbour(pid_t number);

  // Ends the process by SIGKILL, also if it is stopped.
  void Kill() const;

 private:
  File process_;
};

}  // namespace horovod_partial::heartbeat
