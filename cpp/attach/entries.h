// Puts buckets' tensors into Horovod's tensor table, as hvd.allreduce does with its tensors, but queues no requests.
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

  // Adds this rank's part of a round to Horovod's tensor table. When the reduction has ended, calls `finished` with an
  // error or an empty text, but not if this rank takes no part. Throws std::logic_error if the table has the bucket.
  void Add(const std::string& bucket, const BucketConfig& config, const Bucket::Entry& entry,
           std::function<void(const std::string& error)> finished);
  // Adds zeros for a bucket to Horovod's tensor table, unless the table already has the bucket. So this rank takes part
  // in a round without a contribution, because the bucket has failed (here or on all ranks), or because other ranks
  // began to use it during a join of this rank. Nobody reads the result. Throws EngineError if there is no memory.
  void AddZeros(const std::string& bucket, hvd::DataType type, std::int64_t elements, int device);
  // Adds zeros for each bucket in `responses` that Horovod's tensor table lacks, because Horovod looks up each of them.
  void AddWhatIsMissing(const hvd::ResponseList& responses);
  // Adds a tensor that is never reduced. So this rank learns of Horovod's shutdown: Horovod then calls the callback of
  // each tensor in its table, and so calls `shut_down`. During these calls Horovod holds the lock of its tensor queue.
  void AddForShutdown(std::function<void(const std::string& reason)> shut_down);

 private:
  hvd::TensorTableEntry Make(const std::string& bucket, Memory& memory) const;
  bool Insert(hvd::TensorTableEntry entry);

  hvd::Controller& controller_;
  const std::int32_t process_set_id_;
  const Engine& engine_;
};

}  // namespace horovod_partial::attach
