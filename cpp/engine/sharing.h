// Work sharing: which micro-batches of an update (an optimizer step) this rank may begin (docs/protocol.md, rule 17).
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

  // --- Functions that the application's threads call:
  // Blocks until this rank may begin a micro-batch of the open update (an optimizer step). Returns the numbers of the
  // micro-batch and the update. Returns nothing if a result must be taken first, or if `is_due` returns true. With
  // `begins` the micro-batch counts as begun. The first bucket in `names` keeps the list of this rank's micro-batches.
  // Throws EngineError.
  std::optional<std::pair<int, int>> Next(const Family& names, bool begins, const IsDue& is_due = nullptr);
  // Gives back the micro-batch that this rank has begun last, because the rank will compute no gradient of it.
  void Return(const std::string& bucket);

  // While an object of this class lives, this rank begins no micro-batch: a thread has ended, or flushes or joins.
  class Leaving : private NonCopyable {
   public:
    explicit Leaving(WorkSharing& sharing) : sharing_(sharing) { Add(1); }
    ~Leaving() { Add(-1); }

   private:
    void Add(int threads) {
      sharing_.leaving_ += threads;
      if (sharing_.surroundings_.shares_work) sharing_.ReportSoon();
    }

    WorkSharing& sharing_;
  };

  // --- Functions that the background thread calls:
  // Returns true if a thread ends, flushes or joins, and no micro-batch is in progress. The report then says that
  // this rank begins no micro-batch.
  bool ReportLeaves();
  // Takes the coordinator's decision which micro-batches this rank may begin. It may allow fewer than the one before.
  void Hear(const std::vector<Grants>& grants);

 private:
  std::optional<std::pair<int, int>> Take(const Buckets& family, bool begins);
  // From now on this rank reports what it has made at once, although it may hold more micro-batches.
  void ReportSoon();

  Surroundings& surroundings_;
  const BucketMap& buckets_;
  const Families& families_;
  std::atomic<int> leaving_{0};        // how many threads end, flush or join; unless it is 0, no micro-batch begins
  std::atomic<bool> has_left_{false};  // true if the last report said that this rank begins no micro-batch
};

}  // namespace horovod_partial
