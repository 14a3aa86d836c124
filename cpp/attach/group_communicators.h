// Communicators of groups of ranks, and reductions that run in them.
#pragma once

#include <chrono>
#include <map>
#include <memory>

#include "attach/gloo_group.h"
#include "attach/horovod.h"
#include "core/group_cache.h"
#include "core/groups.h"

namespace horovod_partial::attach {

// Which library of Horovod's carries a reduction.
enum class Carrier { kMpi, kGloo, kNccl };

// Of one process set. Groups are no process sets: those need a barrier of all ranks to come and go, and a negotiation
// each in every cycle. Horovod's operations take their communicator from the process set, so a group's stands in for it
// while the original runs. Background thread only, as everything that executes responses.
class GroupCommunicators {
  // What the libraries call it; nothing of those that do not carry it.
  struct Communicator {
#if HAVE_MPI
    MPI_Comm mpi = MPI_COMM_NULL;
#endif
#if HAVE_GLOO
    std::shared_ptr<gloo::Context> gloo;
#endif
  };

 public:
  static constexpr std::size_t kCapacity = 128;  // on each rank

  GroupCommunicators(hvd::HorovodGlobalState& state, hvd::ProcessSet& process_set, Rank rank, int size)
      : state_(state), process_set_(process_set), rank_(rank), size_(size), cache_(size, kCapacity) {}

  // Why groups cannot be had with Horovod's present settings, by the name of the operation that stands in the way; or
  // "".
  static std::string Refusal(hvd::HorovodGlobalState& state);

  // Every rank, in the order of the responses: this partition is used now. This rank's communicator is made if there is
  // none, which takes the members only. Throws what the carrier throws.
  void Use(const Partition& partition, Carrier carrier);

  // While it lives, the process set's communicator is that of this rank's group, which Use has made.
  class Scope {
   public:
    Scope(GroupCommunicators& communicators, const Members& members, Carrier carrier);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    hvd::ProcessSet& process_set_;
    const Communicator whole_;
    const int rank_;
    const int size_;
  };

  int made() const { return made_count_; }
  std::chrono::nanoseconds setup() const { return setup_; }  // what making them took

 private:
  Communicator Make(const Members& members, Carrier carrier) const;
  // NCCL gets its identifiers over what the controller talks on.
  Carrier HostCarrier(Carrier carrier) const;

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
