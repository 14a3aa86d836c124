// The engine's interface to the library that runs collectives: Horovod in attach/, threads in tests.
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

  // Submits what this rank reduces in the round that has just closed. Called on the background thread with the bucket's
  // lock held. When the reduction has ended, the library passes `bucket` to Engine::Finished. Throws std::logic_error
  // if the bucket already has an entry.
  virtual void Place(const std::shared_ptr<SharedBucket>& bucket, const std::string& name, const BucketConfig& config,
                     const Bucket::Entry& entry) = 0;
  // Returns false once the library has shut down, whatever the reason.
  virtual bool Alive() const = 0;
  // Called on the application's thread now and then while it waits, without a lock. May throw to end the wait, as after
  // Ctrl-C.
  virtual void Interrupt() const {}
};

}  // namespace horovod_partial
