// Who may still come to a bucket on this rank.
#pragma once

#include <atomic>
#include <cstdint>

namespace horovod_partial {

// What buckets are there for, as an optimizer is. When it is gone, they are retired (docs/protocol.md, rule 11).
class Owner {
 public:
  // Any thread, under any lock, as a garbage collector runs: takes no lock, allocates nothing, and names nothing.
  void Leave();
  bool gone() const { return gone_; }
  // How many owners of this process have left: where this has changed, there is something to report.
  static std::uint64_t Departures();

 private:
  std::atomic<bool> gone_{false};
};

}  // namespace horovod_partial
