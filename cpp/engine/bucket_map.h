// The buckets of one process set on this rank, by name.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "engine/bucket_config.h"
#include "engine/surroundings.h"

namespace horovod_partial {

struct SharedBucket;
using Buckets = std::vector<std::shared_ptr<SharedBucket>>;

// The names of the buckets of one optimizer. The rounds of these buckets are applied together, in one step.
using Family = std::vector<std::string>;

// Any thread may call functions of this class. If a caller must hold a bucket's lock, the function's comment says so.
class BucketMap {
 public:
  explicit BucketMap(Surroundings& surroundings) : surroundings_(surroundings) {}

  // Returns the bucket of this name, and makes it if there is none. Throws std::invalid_argument if the bucket has
  // another configuration, or if its tensor has too many elements for Horovod. Throws EngineError if Horovod has shut
  // down or was initialised anew, or if contributions or results of this rank have been lost.
  std::shared_ptr<SharedBucket> Declare(const std::string& name, const BucketConfig& config);

  // Sets the owner of a bucket: the Python object, such as an optimizer, for which the bucket exists. The bucket need
  // not have been declared. When all ranks have destroyed their objects, the ranks forget the bucket and its
  // statistics. If this rank contributes after its object is gone, the bucket has no owner any more.
  void Own(const std::string& name, const std::shared_ptr<const Owner>& owner);

  std::shared_ptr<SharedBucket> Find(const std::string& name) const;
  // Returns the buckets of these names, or an empty list if one of them does not exist.
  Buckets FindAll(const Family& names) const;
  Buckets All() const;
  // Returns the configuration of a bucket, or null if no bucket has this name.
  std::shared_ptr<const BucketConfig> ConfigOf(const std::string& name) const;

  // Returns the error of the bucket that the coordinator has made fail last on all ranks, or an empty text.
  std::string refusal() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return refusal_;
  }
  // Returns the buckets in which late contributions or missed results were left when their owners were destroyed.
  std::set<std::string> unsettled() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return unsettled_;
  }

 private:
  friend class Engine;

  // --- Functions that only class Engine calls:
  // Puts a bucket back into the map of buckets if all ranks have ended the bucket since this rank declared it. Called
  // with the bucket's lock held, before round 0 of the bucket.
  void Enter(const std::shared_ptr<SharedBucket>& bucket);
  // Removes a bucket from the map. Called with the bucket's lock held.
  void Forget(const SharedBucket& bucket);
  void ForgetOwnersThatLeft();
  // Makes every later declaration of a bucket fail. `reason` is the text of the error.
  void Close(const std::string& reason) {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = reason;
  }
  // Records the error of a bucket that the coordinator makes fail on all ranks. Called with the bucket's lock held.
  void NoteRefusal(const std::string& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    refusal_ = error;
  }
  // Records that this rank lost contributions or results when a bucket failed on all ranks, and that no thread has got
  // the error. The next call of Declare or ThrowIfLost throws `error`, once.
  void NoteLoss(const std::string& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    loss_ = error;
  }
  // Records that a bucket lost its owner with late contributions or missed results left. Called with its lock held.
  void NoteUnsettled(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    unsettled_.insert(name);
  }
  void ThrowIfLost();

  // Returns the owner of a bucket if the owner lives, else null. Called with the mutex held.
  std::shared_ptr<const Owner> OwnerOf(const std::string& name) const;

  Surroundings& surroundings_;
  mutable std::mutex mutex_;  // this mutex guards all members below, but not the contents of buckets
  std::map<std::string, std::shared_ptr<SharedBucket>> buckets_;
  std::map<std::string, std::shared_ptr<const Owner>> owners_;  // the owner of each bucket, until it is destroyed
  std::string closed_;
  std::string refusal_;
  std::string loss_;
  std::set<std::string> unsettled_;  // the buckets for which NoteUnsettled was called
};

}  // namespace horovod_partial
