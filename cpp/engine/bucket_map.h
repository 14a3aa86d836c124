// The buckets of one engine, by name.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/bucket_config.h"
#include "engine/owner.h"
#include "engine/surroundings.h"

namespace horovod_partial {

struct SharedBucket;
using Buckets = std::vector<std::shared_ptr<SharedBucket>>;

// The names of the buckets of one optimizer. Their results are taken together.
using Family = std::vector<std::string>;

// All functions may be called by any thread. Those that are marked are called under a bucket's lock.
class BucketMap {
 public:
  explicit BucketMap(Surroundings& surroundings) : surroundings_(surroundings) {}

  // Returns the bucket of that name, new or known. Throws std::invalid_argument if the name is bound to another
  // configuration, or the tensor has too many elements for Horovod. Throws EngineError if the generation has ended, or
  // late contributions or missed results of this rank have been lost.
  std::shared_ptr<SharedBucket> Declare(const std::string& name, const BucketConfig& config);
  // Under the bucket's lock, before its round 0. The bucket may have ended since it was declared; then it is entered
  // again.
  void Enter(const std::shared_ptr<SharedBucket>& bucket);
  // Under the bucket's lock.
  void Forget(const SharedBucket& bucket);

  // Gives the bucket of that name an owner, even before it is declared.
  void Own(const std::string& name, const std::shared_ptr<const Owner>& owner);
  void ForgetOwnersThatLeft();

  std::shared_ptr<SharedBucket> Find(const std::string& name) const;
  // Returns nothing if one of the buckets does not exist.
  Buckets FindAll(const Family& names) const;
  Buckets All() const;

  // Nothing is declared any more.
  void Close(const std::string& reason);
  // The coordinator has refused a bucket with this error. Under the bucket's lock.
  void NoteRefusal(const std::string& error);
  // Returns the error of the last bucket that was refused, or "".
  std::string refusal() const;
  // Contributions or results were lost with a refused bucket, and no thread has got that error: the next Declare or
  // ThrowIfLost throws it, once.
  void NoteLoss(const std::string& error);
  void ThrowIfLost();

 private:
  void ThrowIfLostUnderLock();

  Surroundings& surroundings_;
  mutable std::mutex mutex_;  // guards all that follows, but not the buckets' contents
  std::map<std::string, std::shared_ptr<SharedBucket>> buckets_;
  std::map<std::string, std::shared_ptr<const Owner>> owners_;  // by bucket; without owners that have left
  std::string closed_;
  std::string refusal_;
  std::string loss_;
};

}  // namespace horovod_partial
