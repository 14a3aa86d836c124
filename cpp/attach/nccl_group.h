// NCCL's communicator for some of the ranks of a process set.
#pragma once

#include <cstdint>
#include <vector>

#include "attach/horovod.h"
#include "core/groups/groups.h"

#if HAVE_NCCL
namespace horovod_partial::attach {

// Makes the communicator of a group with this rank in it, unless there is one. Horovod keeps it under `devices`, and
// its operation finds it by the devices of a response. `operation` is Horovod's NCCL operation. The process set must
// have the group's communicator of MPI or Gloo meanwhile, because NCCL's id is sent over it. Background thread only.
//
// Horovod's own function does the work. It asks the controller for this rank's place and for the number of ranks. Other
// threads ask the controller too, in hvd.rank() and hvd.size(). So Horovod is made to take the communicator across
// hosts, and only hvd.cross_rank() and hvd.cross_size() tell of the group, while its communicator is made.
void MakeNcclGroup(const hvd::AllreduceOp& operation, hvd::ProcessSet& process_set, Rank rank, const Members& members,
                   const std::vector<hvd::TensorTableEntry>& entries, const std::vector<std::int32_t>& devices);

}  // namespace horovod_partial::attach
#endif
