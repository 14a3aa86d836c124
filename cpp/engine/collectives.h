// The interface to the library that runs the collectives. attach/ implements it on Horovod, and tests do with threads.
#pragma once

#include <memory>
#include <string>

#include "core/rounds/bucket.h"

namespace horovod_partial {

class SharedBucket;

class Collectives {
 public:
  virtual ~Collectives() = default;

  // Background thread, under the bucket's lock: submits this entry to the round that has just closed. Throws
  // std::logic_error if the bucket already has an entry.
  virtual void Place(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Entry& entry) = 0;
  // False once the library has shut down, whatever the reason.
  virtual bool Alive() const = 0;
  // Application's thread: called at intervals in a wait, without any lock. It may throw to end the wait, for Ctrl-C.
  virtual void Interrupt() const {}
};

}  // namespace horovod_partial
