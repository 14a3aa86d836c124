// NCCL's communicator for some of the ranks of a process set.
#pragma once

#include <cstdint>
#include <vector>

#include "attach/horovod.h"
#include "core/groups/groups.h"

#if HAVE_NCCL
namespace horovod_partial::attach {

// Makes NCCL's communicator for a group that includes this rank, unless it exists. Horovod keeps it under `devices`.
// `operation`, Horovod's NCCL operation, finds it if a response has this list of devices. During the call the process
// set must hold the group's MPI or Gloo communicator, because NCCL's id is sent over it. Background thread only.
//
// Horovod's InitNCCLComm makes the communicator. It asks the controller for a rank and a size, and must get those of
// the group. hvd.rank() and hvd.size() in other threads ask the controller too, and must not change. So InitNCCLComm
// makes a communicator "across hosts". Meanwhile only hvd.cross_rank() and hvd.cross_size() are wrong.
void MakeNcclGroup(hvd::AllreduceOp& operation, hvd::ProcessSet& process_set, Rank rank, const Members& members,
                   const std::vector<hvd::TensorTableEntry>& entries, const std::vector<std::int32_t>& devices);

}  // namespace horovod_partial::attach
#endif
