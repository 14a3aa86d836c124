// NCCL's communicator for some of the ranks of a process set.
#pragma once

#include <cstdint>
#include <vector>

#include "attach/horovod.h"
#include "core/groups/groups.h"

#if HAVE_NCCL
namespace horovod_partial::attach {

// Makes NCCL's communicator for a group that includes this rank, unless there is one. Horovod keeps it under `devices`,
// and `operation`, Horovod's NCCL operation, finds it by the device list of a response. During the call the process set
// must hold the group's MPI or Gloo communicator, because NCCL's id is sent over it. Background thread only.
//
// Horovod's InitNCCLComm makes the communicator. It asks the controller for this rank's number and for the number of
// ranks. Other threads ask the controller for the same, in hvd.rank() and hvd.size(). So InitNCCLComm is told to make a
// communicator across hosts. Meanwhile only hvd.cross_rank() and hvd.cross_size() return the numbers of the group.
void MakeNcclGroup(hvd::AllreduceOp& operation, hvd::ProcessSet& process_set, Rank rank, const Members& members,
                   const std::vector<hvd::TensorTableEntry>& entries, const std::vector<std::int32_t>& devices);

}  // namespace horovod_partial::attach
#endif
