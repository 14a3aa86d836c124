// Communicators of groups of ranks, and reductions that run in them.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "attach/gloo_group.h"
#include "attach/horovod.h"
#include "core/groups/group_cache.h"
#include "core/groups/groups.h"
#include "core/rounds/message.h"

namespace horovod_partial::attach {

// The library that carries a reduction.
enum class Carrier { kMpi, kGloo, kNccl };

// Horovod's own execution of a response.
using Reduce = std::function<hvd::Status(const hvd::Response&)>;

// The communicators of a process set's groups. Groups are not process sets of Horovod's: all ranks would have to meet
// to add or remove one, and each one negotiates in every cycle. Horovod's operations take their communicator from the
// process set, so Scope puts the group's there while Horovod's own operation runs. Used by the background thread only,
// like everything that executes responses.
class GroupCommunicators {
  // A group's communicator in each library; empty in those that do not carry it.
  struct Communicator {
#if HAVE_MPI
    MPI_Comm mpi = MPI_COMM_NULL;
#endif
#if HAVE_GLOO
    std::shared_ptr<gloo::Context> gloo;
#endif
  };

 public:
  static constexpr std::size_t kCapacity = 128;  // how many communicators a rank keeps

  GroupCommunicators(hvd::HorovodGlobalState& state, hvd::ProcessSet& process_set, Rank rank, int size)
      : state_(state), process_set_(process_set), rank_(rank), size_(size), cache_(size, kCapacity) {}

  // Returns the operation of Horovod's that does not work with groups under the present settings, and the setting that
  // turns it off; "" if groups work.
  static std::string Refusal(hvd::HorovodGlobalState& state);

  // Reduces a response of ours, whose rounds these are, in this rank's group. Makes the communicators of groups to
  // come.
  hvd::Status Execute(const std::vector<Closing>& closings, const std::vector<hvd::TensorTableEntry>& entries,
                      const hvd::Response& response, Carrier carrier, const Reduce& reduce);

  int made() const { return made_count_; }
  std::chrono::nanoseconds setup() const { return setup_; }  // the time that making them took

 private:
  // Makes the communicator of this rank's group in the partition, unless there is one; frees old ones that the cache
  // gives up. Every rank calls this in the order of the responses, but only the group's members take part in making it.
  // Throws what the carrier throws.
  void Use(const Partition& partition, Carrier carrier);

  // While it lives, the process set has the communicator of this rank's group. Use must have made that before.
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

  Communicator Make(const Members& members, Carrier carrier) const;
  // The library in which Make makes a communicator: for NCCL that of the controller, over which NCCL's own communicator
  // is set up.
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
