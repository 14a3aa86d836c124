// How the ranks find out that they use one format of messages, before any other message of ours travels.
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

// The context of the handshake's allreduce. The hook in place of Horovod's Execute recognises the allreduce by it.
class HandshakeContext final : public BucketContext {
 public:
  explicit HandshakeContext(bool waits_are_told) : BucketContext(Memory::Host()), waits_are_told_(waits_are_told) {}

  // Called on Horovod's thread when the handshake's allreduce has ended. All ranks call this in the same cycle, with
  // the same sums. So from the next cycle on, either all ranks send messages of ours, or none does.
  void Ended(hvd::HorovodGlobalState& state, const std::int64_t* sums);
  // For the application's thread, after the allreduce. Returns Horovod's state, or null if no hook of ours saw it.
  hvd::HorovodGlobalState* state() const { return state_; }

 private:
  const bool waits_are_told_;
  std::atomic<hvd::HorovodGlobalState*> state_{nullptr};
};

// The functions below are for the application's threads only.

// Returns the sums of numbers over all ranks, by an ordinary allreduce of Horovod's. Blocks until it is done. All ranks
// must pass equally many numbers.
std::vector<std::int64_t> SumOverRanks(const Attached& attached, const std::string& name,
                                       std::vector<std::int64_t> values, std::shared_ptr<hvd::OpContext> context);
// Returns the session of a process set, or null if there is none.
std::shared_ptr<Session> Lookup(const Attached& attached, std::int32_t process_set_id);
// Returns the session of all ranks if this generation of Horovod has shaken hands, else null.
std::shared_ptr<Session> FindIntroduced(const Attached& attached);
// Shakes hands with all ranks, unless another thread has done so meanwhile. Throws AttachError if the ranks run
// different versions, or if a hook has not run. The hooks stay installed even then, because Horovod's thread may be in
// one of them. They call Horovod's functions.
std::shared_ptr<Session> Introduce(Attached& attached);

}  // namespace horovod_partial::attach
