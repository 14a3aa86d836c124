// Communicators of groups of ranks, and reductions that run in them.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "attach/gloo_group.h"
#include "attach/horovod.h"
#include "core/groups/groups.h"
#include "core/rounds/message.h"

namespace horovod_partial::attach {

// The communication library that reduces the data.
enum class Carrier { kMpi, kGloo, kNccl };

// A function that executes a response as Horovod would without us.
using Reduce = std::function<hvd::Status(const hvd::Response&)>;

// The communicators of a process set's groups. Groups are no process sets of Horovod, because all ranks must meet to
// add or remove a process set, and each process set negotiates in every cycle. Horovod's operations take their
// communicator from the process set. So while an operation runs for a group, the process set holds the communicator of
// the group. Used by the background thread only.
class GroupCommunicators {
  // The communicator of a group. One member is set, for MPI or for Gloo. The other member is null.
  struct Communicator {
#if HAVE_MPI
    MPI_Comm mpi = MPI_COMM_NULL;
#endif
#if HAVE_GLOO
    std::shared_ptr<gloo::Context> gloo;
#endif
  };

 public:
  static constexpr std::size_t kCapacity = 128;  // the most MPI or Gloo communicators of a rank; NCCL's are not limited

  GroupCommunicators(hvd::HorovodGlobalState& state, hvd::ProcessSet& process_set, Rank rank, int size)
      : state_(state), process_set_(process_set), rank_(rank), size_(size), cache_(size, kCapacity) {}

  // Says which operation of Horovod does not work with groups under the present settings, and which setting turns it
  // off. Returns an empty text if groups work.
  static std::string Refusal(hvd::HorovodGlobalState& state);

  // Executes a response, in this rank's group if the rounds in `closings` have groups. Also makes communicators that
  // later rounds need. `operation` is Horovod's operation, and `reduce` executes a response with it.
  hvd::Status Execute(const std::vector<Closing>& closings, const std::vector<hvd::TensorTableEntry>& entries,
                      const hvd::Response& response, Carrier carrier, hvd::AllreduceOp& operation,
                      const Reduce& reduce);

  int made() const { return made_count_; }
  std::chrono::nanoseconds setup() const { return setup_; }  // the total time of making communicators

 private:
  // Makes the communicator of this rank's group, unless it exists. `partition` is a division of the ranks into groups.
  // Frees the communicators of groups that the cache evicts. Every rank calls this in the order of the responses, so
  // all ranks evict the same groups. Throws if MPI or Gloo fails.
  void Use(const Partition& partition, Carrier carrier);

  hvd::Status ReduceInGroup(const Members& members, const std::vector<hvd::TensorTableEntry>& entries,
                            const hvd::Response& response, Carrier carrier, hvd::AllreduceOp& operation,
                            const Reduce& reduce);
  static void ReduceAlone(const std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response);
  Communicator Make(const Members& members, Carrier carrier) const;

  hvd::HorovodGlobalState& state_;
  hvd::ProcessSet& process_set_;
  const Rank rank_;
  const int size_;
  GroupCache cache_;
  std::map<Members, Communicator> made_;
  int made_count_ = 0;
  std::chrono::nanoseconds setup_{0};
};

}  // namespace horovod_partial::attach
