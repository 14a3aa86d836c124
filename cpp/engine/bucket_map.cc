#include "engine/bucket_map.h"

#include <limits>
#include <stdexcept>
#include <utility>

#include "engine/shared_bucket.h"

namespace horovod_partial {
namespace {

// Horovod passes the number of elements to Gloo, MPI and NCCL as an int. A larger number would be cut off silently.
constexpr std::size_t kMostElements = std::numeric_limits<int>::max();

}  // namespace

std::shared_ptr<SharedBucket> BucketMap::Declare(const std::string& name, const BucketConfig& config) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.empty()) throw EngineError(closed_);
  if (!loss_.empty()) throw EngineError(std::exchange(loss_, {}));
  const std::string rank = "rank " + std::to_string(surroundings_.rank) + ": ";
  if (config.elements() > kMostElements) {
    throw std::invalid_argument(rank + name + " has " + std::to_string(config.elements()) +
                                " elements, and Horovod counts up to " + std::to_string(kMostElements) +
                                " in one reduction; reduce it in parts, or split the parameter that is as large");
  }
  auto& bucket = buckets_[name];
  if (bucket == nullptr) {
    bucket = std::make_shared<SharedBucket>(surroundings_, name, config);
    bucket->owner = OwnerOf(name);  // without the bucket's lock, because no other thread can see the bucket yet
  }
  if (!(bucket->config == config)) {
    throw std::invalid_argument(
        rank + "the name " + name + " is bound to another shape, dtype, device, policy or scaling: to " +
        Describe(bucket->config.declaration()) + ", and not to " + Describe(config.declaration()) +
        "; use another name, or the same arguments in every round");
  }
  return bucket;
}

void BucketMap::Enter(const std::shared_ptr<SharedBucket>& bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string& name = bucket->core.name();
  if (buckets_.emplace(name, bucket).first->second != bucket)
    throw std::invalid_argument("the name " + name + " has been declared anew by another thread");
  if (const auto owner = OwnerOf(name)) bucket->owner = owner;
}

std::shared_ptr<const Owner> BucketMap::OwnerOf(const std::string& name) const {
  const auto owner = owners_.find(name);
  return owner == owners_.end() || owner->second->gone() ? nullptr : owner->second;
}

void BucketMap::Forget(const SharedBucket& bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  buckets_.erase(bucket.core.name());
}

void BucketMap::Own(const std::string& name, const std::shared_ptr<const Owner>& owner) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    owners_[name] = owner;
  }
  const auto bucket = Find(name);
  if (bucket == nullptr) return;
  std::lock_guard<std::mutex> lock(bucket->mutex);
  bucket->owner = owner;
}

void BucketMap::ForgetOwnersThatLeft() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = owners_.begin(); it != owners_.end();) it = it->second->gone() ? owners_.erase(it) : std::next(it);
}

std::shared_ptr<SharedBucket> BucketMap::Find(const std::string& name) const {
  const Buckets found = FindAll({name});
  return found.empty() ? nullptr : found.front();
}

Buckets BucketMap::FindAll(const Family& names) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Buckets buckets;
  for (const std::string& name : names) {
    const auto found = buckets_.find(name);
    if (found == buckets_.end()) return {};
    buckets.push_back(found->second);
  }
  return buckets;
}

std::shared_ptr<const BucketConfig> BucketMap::ConfigOf(const std::string& name) const {
  const auto bucket = Find(name);
  return bucket == nullptr ? nullptr : std::shared_ptr<const BucketConfig>(bucket, &bucket->config);
}

Buckets BucketMap::All() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Buckets buckets;
  for (const auto& [name, bucket] : buckets_) buckets.push_back(bucket);
  return buckets;
}

void BucketMap::ThrowIfLost() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!loss_.empty()) throw EngineError(std::exchange(loss_, {}));
}

}  // namespace horovod_partial
