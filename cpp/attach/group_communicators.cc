#include "attach/group_communicators.h"

#include <stdexcept>

#include "attach/device.h"
#include "attach/nccl_group.h"

namespace horovod_partial::attach {
#if HAVE_NCCL
namespace {

// Horovod keeps NCCL communicators under lists of devices. A group's list ends with this number, which no device has.
constexpr std::int32_t kGroupKey = -2;

}  // namespace
#endif

std::string GroupCommunicators::Refusal(hvd::HorovodGlobalState& state) {
#if HAVE_NCCL
  if (state.parameter_manager.HierarchicalAllreduce())
    return "NCCLHierarchicalAllreduce; set HOROVOD_HIERARCHICAL_ALLREDUCE=0";
  if (state.parameter_manager.TorusAllreduce()) return "NCCLTorusAllreduce; set HOROVOD_TORUS_ALLREDUCE=0";
#endif
  if (state.cpu_operation == hvd::LibType::CCL) return "CCLAllreduce; set HOROVOD_CPU_OPERATIONS to MPI or GLOO";
  return {};
}

hvd::Status GroupCommunicators::Execute(const std::vector<Closing>& closings,
                                        const std::vector<hvd::TensorTableEntry>& entries,
                                        const hvd::Response& response, Carrier carrier, hvd::AllreduceOp& operation,
                                        const Reduce& reduce) {
  const Partition groups = closings[0].groups;
  for (const Closing& closing : closings)
    if (closing.groups != groups || (!groups.empty() && closings.size() != response.tensor_names().size()))
      return hvd::Status::UnknownError("internal error: tensors of different groups were fused");
  hvd::Status status = hvd::Status::OK();
  if (groups.empty()) {
    status = reduce(response);
  } else {
    Use(groups, carrier);
    const Members members = GroupOf(groups, rank_, size_);
    if (members.size() > 1) {
      status = ReduceInGroup(members, entries, response, carrier, operation, reduce);
    } else {
#if HAVE_GPU
      // After a reduction by NCCL, Horovod takes its next NCCL stream. A rank that does not use NCCL must do so, too.
      if (response.devices()[0] != CPU_DEVICE_ID)
        state_.current_nccl_stream = (state_.current_nccl_stream + 1) % state_.num_nccl_streams;
#endif
      if (!members.empty()) ReduceAlone(entries, response);
    }
  }
  for (const Closing& closing : closings)
    for (const Partition& partition : closing.upcoming) Use(partition, carrier);
  return status;
}

hvd::Status GroupCommunicators::ReduceInGroup(const Members& members,
                                              [[maybe_unused]] const std::vector<hvd::TensorTableEntry>& entries,
                                              const hvd::Response& response, [[maybe_unused]] Carrier carrier,
                                              [[maybe_unused]] hvd::AllreduceOp& operation, const Reduce& reduce) {
  const Communicator& group = made_.at(members);
#if HAVE_MPI
  MPI_Comm& communicator = process_set_.mpi_context.mpi_comm;
  const Instead communicator_of_group(communicator, group.mpi != MPI_COMM_NULL ? group.mpi : communicator);
#endif
#if HAVE_GLOO
  std::shared_ptr<gloo::Context>& context = process_set_.gloo_context.ctx;
  const Instead context_of_group(context, group.gloo != nullptr ? group.gloo : context);
#endif
#if HAVE_NCCL
  if (carrier == Carrier::kNccl) {
    hvd::Response mine = response;  // a copy with other devices, by which Horovod finds NCCL's communicator
    std::vector<std::int32_t> devices = members;
    for (const Rank member : members) devices.push_back(response.devices()[Index(member)]);
    devices.push_back(kGroupKey);
    MakeNcclGroup(operation, process_set_, rank_, members, entries, devices);
    mine.set_devices(devices);
    return reduce(mine);
  }
#endif
  return reduce(response);
}

// Reduces in a group that has this rank only: copies each input to its output, and scales it.
void GroupCommunicators::ReduceAlone(const std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response) {
  const double factor = response.prescale_factor() * response.postscale_factor();
  for (const auto& entry : entries) {
    Memory& memory = MemoryOf(entry.device);
    void* const output = const_cast<void*>(entry.output->data());
    if (entry.tensor->data() != output)
      memory.Copy(output, entry.tensor->data(), static_cast<std::size_t>(entry.tensor->size()));
    const auto elements = static_cast<std::size_t>(entry.tensor->shape().num_elements());
    if (factor != 1) memory.Scale(static_cast<DataType>(response.tensor_type()), output, elements, factor);
  }
}

void GroupCommunicators::Use(const Partition& partition, Carrier carrier) {
  for (const Members& group : GroupsOf(partition)) {
    for (const Members& evicted : cache_.Use(group)) {
      const auto it = made_.find(evicted);
      if (it == made_.end()) continue;
#if HAVE_MPI
      // All members of a communicator must call MPI_Comm_free. They do, because all ranks evict a group at the same
      // response. (When the program ends, MPI frees the communicators that still exist.)
      if (it->second.mpi != MPI_COMM_NULL) MPI_Comm_free(&it->second.mpi);
#endif
      made_.erase(it);
    }
  }
  const Members members = GroupOf(partition, rank_, size_);
  if (members.size() < 2 || made_.count(members) > 0) return;
  const auto start = std::chrono::steady_clock::now();
  made_[members] = Make(members, carrier);
  ++made_count_;
  setup_ += std::chrono::steady_clock::now() - start;
}

GroupCommunicators::Communicator GroupCommunicators::Make(const Members& members, Carrier carrier) const {
  // MakeNcclGroup sets up NCCL's communicator over that of the library of Horovod's controller.
  if (carrier == Carrier::kNccl)
    carrier = state_.control_operation == hvd::LibType::MPI ? Carrier::kMpi : Carrier::kGloo;
  Communicator made;
#if HAVE_MPI
  if (carrier == Carrier::kMpi) {
    constexpr int kTag = 0;  // one tag is enough, because a group makes one communicator at a time
    MPI_Group all = MPI_GROUP_NULL;
    MPI_Group some = MPI_GROUP_NULL;
    MPI_Comm_group(process_set_.mpi_context.mpi_comm, &all);
    MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &some);
    const int result = MPI_Comm_create_group(process_set_.mpi_context.mpi_comm, some, kTag, &made.mpi);
    MPI_Group_free(&some);
    MPI_Group_free(&all);
    if (result != MPI_SUCCESS) throw std::runtime_error("MPI_Comm_create_group failed");
  }
#endif
#if HAVE_GLOO
  if (carrier == Carrier::kGloo) made.gloo = MakeGlooGroup(process_set_.gloo_context.ctx, members);
#endif
  return made;
}

}  // namespace horovod_partial::attach
