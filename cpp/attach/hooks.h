// Our functions in place of Horovod's.
#pragma once

#include "attach/library.h"

namespace horovod_partial::attach {

// Puts the hooks in place of virtual functions of the library's controllers and allreduces, for the transports (MPI,
// Gloo, NCCL) of this build. Throws AttachError if this build was made for another Horovod; then no function has been
// replaced. One thread at a time may call this.
void InstallHooks(const Library& library);

}  // namespace horovod_partial::attach
