// NCCL's communicator for some of the ranks of a process set.
#pragma once

#include <cstdint>
#include <vector>

#include "attach/horovod.h"
#include "core/groups/groups.h"

#if HAVE_NCCL
namespace horovod_partial::attach {

// Makes NCCL's communicator for a group that includes this rank, unless it exists. Horovod keeps the communicator under
// `devices`, and `operation` (Horovod's NCCL operation) uses it for responses with this list of devices. The process
// set must hold the group's MPI or Gloo communicator, over which NCCL's id is sent. Background thread only.
//
// Horovod's InitNCCLComm makes the communicator. It asks the controller for a rank and a size, and must get those of
// the group. hvd.rank() and hvd.size() in other threads ask the controller too, and must not change. So InitNCCLComm
// makes a communicator "across hosts", and asks for the cross rank and size. Only hvd.cross_rank() and hvd.cross_size()
// are wrong during the call.
void MakeNcclGroup(hvd::AllreduceOp& operation, hvd::ProcessSet& process_set, Rank rank, const Members& members,
                   const std::vector<hvd::TensorTableEntry>& entries, const std::vector<std::int32_t>& devices);

}  // namespace horovod_partial::attach
#endif
