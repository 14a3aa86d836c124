// Another rank's process on this host.
#pragma once

#include <sys/types.h>

#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {

// Holds on to the process itself: a number may be given to somebody else when the process has ended.
class Neighbour {
 public:
  // Where the kernel cannot hold on to processes (before Linux 5.3), or there is none of this number, `Kill` does
  // nothing.
  explicit Neighbour(pid_t number);

  // Ends it whatever it does, stopped processes too.
  void Kill() const;

 private:
  File process_;
};

}  // namespace horovod_partial::heartbeat
