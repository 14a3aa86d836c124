// Work sharing on one rank: which micro-batches it may begin (docs/protocol.md, work sharing).
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/rounds/message.h"
#include "engine/bucket_map.h"
#include "engine/families.h"
#include "engine/surroundings.h"

namespace horovod_partial {

class WorkSharing {
 public:
  WorkSharing(Surroundings& surroundings, const BucketMap& buckets, const Families& families)
      : surroundings_(surroundings), buckets_(buckets), families_(families) {}

  // --- Application's threads
  // Blocks until this rank may begin a micro-batch of the open update. Returns the numbers of the micro-batch and of
  // the update. Returns nothing if there is a round to take first, or something is due. With `begins` the micro-batch
  // counts as begun. The first bucket of the family keeps the grants. Throws EngineError.
  std::optional<std::pair<int, int>> Next(const Family& names, bool begins, const IsDue& is_due = nullptr);
  // Gives back the micro-batch that was begun last: it has made no gradient, and will not.
  void Return(const std::string& bucket);

  // While such an object lives, this rank begins no micro-batch.
  class Leaving {
   public:
    explicit Leaving(WorkSharing& sharing) : sharing_(sharing) { Add(1); }
    ~Leaving() { Add(-1); }
    Leaving(const Leaving&) = delete;
    Leaving& operator=(const Leaving&) = delete;

   private:
    void Add(int threads) {
      sharing_.leaving_ += threads;
      if (sharing_.surroundings_.shares_work) sharing_.surroundings_.news = true;
    }

    WorkSharing& sharing_;
  };

  // --- Background thread
  // Returns what this cycle's report says: whether some thread leaves, so that none begins a micro-batch, and none that
  // was begun is unfinished.
  bool ReportLeaves();
  // Takes the coordinator's new grants. They may be fewer than before.
  void Hear(const std::vector<Grants>& grants);

 private:
  std::optional<std::pair<int, int>> Take(const Buckets& family, bool begins);

  Surroundings& surroundings_;
  const BucketMap& buckets_;
  const Families& families_;
  std::atomic<int> leaving_{0};        // threads that end, flush or join: while there are any, no micro-batch begins
  std::atomic<bool> has_left_{false};  // the last report says that this rank leaves; holds until the next one
};

}  // namespace horovod_partial
