// The interface to the library that runs collectives. This is Horovod, or a stand-in in tests.
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
  // lock held. When the reduction has ended, Engine::Finished is called with `bucket`. Throws std::logic_error if an
  // earlier reduction of the bucket has not ended.
  virtual void Place(const std::shared_ptr<SharedBucket>& bucket, const std::string& name, const BucketConfig& config,
                     const Bucket::Entry& entry) = 0;
  // Returns false once Horovod has shut down, whatever the reason.
  virtual bool Alive() const = 0;
  // Called now and then on a thread of the application that waits. The thread holds no lock then. This function may
  // throw to end the wait, for example after Ctrl-C.
  virtual void Interrupt() const {}
};

}  // namespace horovod_partial
