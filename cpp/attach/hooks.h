// Hooks: functions of ours, which Horovod calls in place of its own.
#pragma once

#include "attach/library.h"

namespace horovod_partial::attach {

// Replaces virtual functions of the Horovod library's controllers and allreduces by hooks, for the transports (MPI,
// Gloo, NCCL) of this build. If this build was made for another Horovod, throws AttachError and replaces nothing. One
// thread at a time may call this.
void InstallHooks(const Library& library);

}  // namespace horovod_partial::attach
