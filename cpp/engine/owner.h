// The owner of a bucket: the Python object for which the bucket exists on this rank.
#pragma once

#include <atomic>
#include <cstdint>

namespace horovod_partial {

// An object that uses buckets, such as an optimizer. When it is gone, its buckets retire (docs/protocol.md, rule 11).
class Owner {
 public:
  // A garbage collector may call Leave on any thread, under any lock. So Leave takes no lock and allocates no memory.
  void Leave();
  bool gone() const { return gone_; }
  // Returns how many owners of buckets in this process are gone. When this changes, the rank has something to report.
  static std::uint64_t Departures();

 private:
  std::atomic<bool> gone_{false};
};

}  // namespace horovod_partial
