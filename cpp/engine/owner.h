// The object for which buckets exist on this rank.
#pragma once

#include <atomic>
#include <cstdint>

namespace horovod_partial {

// An object that uses buckets, such as an optimizer. When it is gone, they retire (docs/protocol.md, rule 11).
class Owner {
 public:
  // Any thread, under any lock, because a garbage collector may call it. So it takes no lock and allocates no memory.
  void Leave();
  bool gone() const { return gone_; }
  // Counts the owners of this process that have left. If the count has changed, this rank has something to report.
  static std::uint64_t Departures();

 private:
  std::atomic<bool> gone_{false};
};

}  // namespace horovod_partial
