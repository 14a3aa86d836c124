// The interface to the library that runs the collectives. attach/ implements it on Horovod, and tests do with threads.
#pragma once

#include <memory>
#include <string>

#include "core/rounds/bucket.h"
#include "engine/bucket_config.h"

namespace horovod_partial {

struct SharedBucket;

class Collectives {
 public:
  virtual ~Collectives() = default;

  // Background thread, under the bucket's lock: submits this entry to the round that has just closed. When it is
  // reduced, Engine::Finished gets `bucket` back. Throws std::logic_error if the bucket already has an entry.
  virtual void Place(const std::shared_ptr<SharedBucket>& bucket, const std::string& name, const BucketConfig& config,
                     const Bucket::Entry& entry) = 0;
  // False once the library has shut down, whatever the reason.
  virtual bool Alive() const = 0;
  // Application's thread: called at intervals in a wait, without any lock. It may throw to end the wait, for Ctrl-C.
  virtual void Interrupt() const {}
};

}  // namespace horovod_partial
