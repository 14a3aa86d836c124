#include "attach/nccl_group.h"

#if HAVE_NCCL
#include <tuple>

#include "horovod/common/ops/nccl_operations.h"

namespace horovod_partial::attach {
namespace {

struct NcclAccess : hvd::NCCLAllreduce {
  using hvd::NCCLAllreduce::global_state_;
  using hvd::NCCLAllreduce::gpu_op_context_;
  using hvd::NCCLAllreduce::nccl_context_;
};

}  // namespace

void MakeNcclGroup(hvd::AllreduceOp& operation, hvd::ProcessSet& process_set, Rank rank, const Members& members,
                   const std::vector<hvd::TensorTableEntry>& entries, const std::vector<std::int32_t>& devices) {
  auto& nccl = static_cast<NcclAccess&>(operation);
  hvd::HorovodGlobalState& state = *nccl.global_state_;
  const auto& made = nccl.nccl_context_->nccl_comms.at(static_cast<std::size_t>(state.current_nccl_stream));
  const auto found = made.find(std::make_tuple(entries.at(0).process_set_id, devices));
  if (found != made.end() && found->second != nullptr) return;
  auto& controller = ControllerAccess::Of(*process_set.controller);
  const Instead place(controller.cross_rank_, PlaceOf(members, rank));
  const Instead size(controller.cross_size_, static_cast<int>(members.size()));
#if HAVE_MPI
  const Instead mpi(process_set.mpi_context.cross_comm, process_set.mpi_context.mpi_comm);
#endif
#if HAVE_GLOO
  const Instead gloo(process_set.gloo_context.cross_ctx, process_set.gloo_context.ctx);
#endif
  nccl.gpu_op_context_.InitGPU(entries);  // sets this thread's current GPU, because NCCL takes that GPU
  hvd::NCCLOpContext across(nccl.nccl_context_, &state, hvd::Communicator::CROSS);
  across.InitNCCLComm(entries, devices);
}

}  // namespace horovod_partial::attach
#endif
