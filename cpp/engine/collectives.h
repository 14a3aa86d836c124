// What the engine needs of the collectives' library below it. attach/ implements it on Horovod, tests on threads.
#pragma once

#include <memory>
#include <string>

#include "core/bucket.h"

namespace horovod_partial {

class SharedBucket;

class Collectives {
 public:
  virtual ~Collectives() = default;

  // Background thread, under the bucket's lock: this entry takes part in the round that has just been closed. Throws
  // std::logic_error if the bucket has an entry already.
  virtual void Place(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Entry& entry) = 0;
  // False once the library has shut down, whatever the reason.
  virtual bool Alive() const = 0;
  // Application's thread, now and then in a wait, without any lock. May throw to end the wait: for Ctrl-C.
  virtual void Interrupt() const {}
};

}  // namespace horovod_partial
