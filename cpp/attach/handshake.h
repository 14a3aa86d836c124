// How the ranks find out that they understand each other, before any other message of ours travels.
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

// The context of the handshake's allreduce, by which the hook of Execute knows it.
class HandshakeContext final : public BucketContext {
 public:
  explicit HandshakeContext(bool waits_are_told) : BucketContext(Memory::Host()), waits_are_told_(waits_are_told) {}

  // Horovod's thread, in Execute: the allreduce has ended. All ranks come here in the same cycle, and find the same
  // sums. So either each rank understands the others' messages from the next cycle on, or none sends any.
  void Ended(hvd::HorovodGlobalState& state, const std::int64_t* sums);
  // The application's thread, after that: where Horovod's state is; null if Execute has not met this context.
  hvd::HorovodGlobalState* state() const { return state_; }

 private:
  const bool waits_are_told_;
  std::atomic<hvd::HorovodGlobalState*> state_{nullptr};
};

// The application's threads only:

// Returns the sums of numbers over all ranks, by an ordinary allreduce of Horovod's. Blocks until it is done. All ranks
// give the same count of numbers.
std::vector<std::int64_t> SumOverRanks(const Attached& attached, const std::string& name,
                                       std::vector<std::int64_t> values, std::shared_ptr<hvd::OpContext> context);
// Returns the session of a process set, or null if there is none.
std::shared_ptr<Session> Lookup(const Attached& attached, std::int32_t process_set_id);
// Returns the session of all ranks if this generation of Horovod has shaken hands, else null.
std::shared_ptr<Session> FindIntroduced(const Attached& attached);
// Shakes hands, unless another thread has done so meanwhile. Throws AttachError if the ranks do not understand each
// other, or if a hook is missing. Then the hooks stay where they are, and call Horovod's functions: Horovod's thread
// may be in one of them.
std::shared_ptr<Session> Introduce(Attached& attached);

}  // namespace horovod_partial::attach
