// Our entries in Horovod's table of tensors. They are like the entries of hvd.allreduce, but have no request.
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

  // Adds the entry of a round. When the reduction has ended, `finished` is called with its error, or an empty text.
  // Throws std::logic_error if the bucket has an entry.
  void Add(const std::string& bucket, const BucketConfig& config, const Bucket::Entry& entry,
           std::function<void(const std::string& error)> finished);
  // Adds an entry with zeros, unless the bucket has an entry. Nobody reads its result. It lets this rank take part
  // where the engine has made no entry: in a bucket that was first used while this rank had joined, that has failed on
  // this rank, or that is refused. Throws EngineError if there is no memory for the zeros.
  void AddZeros(const std::string& bucket, hvd::DataType type, std::int64_t elements, int device);
  // Adds zeros for each bucket in `responses` that has no entry, because Horovod needs an entry for each tensor.
  void AddWhatIsMissing(const hvd::ResponseList& responses);
  // Adds an entry that is never reduced. When Horovod shuts down, it calls the callbacks of all entries, so it calls
  // `shut_down`. Horovod holds the lock of its queue meanwhile.
  void AddForShutdown(std::function<void(const std::string& reason)> shut_down);

 private:
  hvd::TensorTableEntry Make(const std::string& bucket, Memory& memory) const;
  bool Insert(hvd::TensorTableEntry entry);

  hvd::Controller& controller_;
  const std::int32_t process_set_id_;
  const Engine& engine_;
};

}  // namespace horovod_partial::attach
