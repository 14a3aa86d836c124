// The handshake: the ranks check that all use the same format of messages, before they send any message of ours.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attach/attached.h"
#include "attach/session.h"
#include "attach/tensors.h"

namespace horovod_partial::attach {

// The OpContext of the handshake's allreduce. By this type our hook `Execute` recognises the allreduce.
class HandshakeContext final : public BucketContext {
 public:
  explicit HandshakeContext(bool waits_are_told) : BucketContext(Memory::Host()), waits_are_told_(waits_are_told) {}

  // Called on Horovod's thread when the handshake's allreduce has ended. All ranks call this in the same cycle, with
  // the same sums. So from the next cycle on, either all ranks send messages of ours, or none does.
  void Ended(hvd::HorovodGlobalState& state, const std::int64_t* sums);
  // Called by the application's thread after the allreduce. Returns Horovod's state, or null if our hook did not run.
  hvd::HorovodGlobalState* state() const { return state_; }

 private:
  const bool waits_are_told_;
  std::atomic<hvd::HorovodGlobalState*> state_{nullptr};
};

// Only the application's threads may call SumOverRanks, Lookup, FindIntroduced and Introduce.

// Returns the sums of `values` over all ranks. Blocks until Horovod's ordinary allreduce of them is done. All ranks
// must pass equally many values.
std::vector<std::int64_t> SumOverRanks(const Attached& attached, const std::string& name,
                                       std::vector<std::int64_t> values, std::shared_ptr<hvd::OpContext> context);
// Returns the session of a process set, or null if there is none.
std::shared_ptr<Session> Lookup(const Attached& attached, std::int32_t process_set_id);
// Returns the session of the process set of all ranks, or null if there was no handshake since the last `init`.
std::shared_ptr<Session> FindIntroduced(const Attached& attached);
// Runs the handshake with all ranks, unless another thread has done so meanwhile. Throws AttachError if the ranks run
// different versions, or if a hook has not run. Even then the hooks stay installed, because Horovod's thread may be in
// one of them. Each hook calls the function of Horovod that it has replaced.
std::shared_ptr<Session> Introduce(Attached& attached);

}  // namespace horovod_partial::attach
