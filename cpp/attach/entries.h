// Our entries in Horovod's table of tensors, like those of Horovod's own Enqueue, but without a request.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "attach/horovod.h"
#include "core/rounds/bucket.h"
#include "engine/bucket_config.h"
#include "engine/engine.h"

namespace horovod_partial::attach {

class Entries {
 public:
  Entries(hvd::Controller& controller, std::int32_t process_set_id, const Engine& engine)
      : controller_(controller), process_set_id_(process_set_id), engine_(engine) {}

  // Adds the entry of a round. `finished` is called with the reduction's error, or "". Throws std::logic_error if the
  // bucket has an entry.
  void Add(const std::string& bucket, const BucketConfig& config, const Bucket::Entry& entry,
           std::function<void(const std::string& error)> finished);
  // Adds zeros, whose result nobody reads, unless the bucket has an entry. This rank takes part with them where the
  // engine has made no entry: if the bucket was first used while this rank had joined, if it has failed here, or if it
  // is refused. Throws EngineError if there is no memory for them.
  void AddZeros(const std::string& bucket, hvd::DataType type, std::int64_t elements, int device);
  // Adds zeros for all our responses that have no entry yet: Horovod relies on one for each tensor.
  void AddWhatIsMissing(const hvd::ResponseList& responses);
  // Adds an entry that is never reduced. Horovod calls every entry back when it shuts down, so this one tells of that.
  // The callback comes with the queue's lock held.
  void AddForShutdown(std::function<void(const std::string& reason)> shut_down);

 private:
  hvd::TensorTableEntry Make(const std::string& bucket, Memory& memory) const;
  bool Insert(hvd::TensorTableEntry entry);

  hvd::Controller& controller_;
  const std::int32_t process_set_id_;
  const Engine& engine_;
};

}  // namespace horovod_partial::attach
