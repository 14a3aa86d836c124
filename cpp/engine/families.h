// A family is the buckets of one optimizer. Their results are taken together, in one step (docs/protocol.md, families).
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <vector>

#include "engine/bucket_map.h"
#include "engine/flush.h"
#include "engine/surroundings.h"

namespace horovod_partial {

// Gives the results of rounds to the application's threads. Each function locks the buckets of a family one after the
// other. That is safe, because other threads can meanwhile only add the results of newer rounds.
class Families {
 public:
  Families(Surroundings& surroundings, const BucketMap& buckets, const Flush& flush)
      : surroundings_(surroundings), buckets_(buckets), flush_(flush) {}

  // Takes the oldest untaken round that has ended in all buckets of a family on this rank, and writes its results to
  // `outputs`, one for each bucket. If untaken results had to be added up, takes several rounds as one. Returns the
  // number of gradients in all results; if it is 0, there is nothing to apply. Returns nothing if there is no such
  // round, or if the round comes after the flush in which this rank is. Only the thread that contributes to the family
  // may call this. Results of arrivals on time are mostly in `outputs` already. If something must be written there,
  // `before_writing` is called before: a device may still use that memory.
  std::optional<int> TakeRound(const Family& family, const std::vector<void*>& outputs,
                               const std::function<void()>& before_writing = nullptr);
  bool HasRound(const Family& family) const;
  // Returns true if a family has a round to take, and one of its buckets has room for at most one more untaken result.
  bool IsNearlyFull(const Family& family) const;
  // Records that the calling thread will contribute to a family next, even if other threads did so before.
  void Claim(const Family& family) const;
  // Forgets late contributions and missed results of a family on this rank. A round may have ended in only some of the
  // buckets. These buckets count the round, though without a result, so that all buckets stay at the same round.
  void Clear(const Family& family);
  // Returns how many rounds have ended on this rank in all buckets of a family. If the application takes missed rounds
  // one by one (Missed::kReplay), returns how many it has taken.
  Round Taken(const Family& family) const;
  // Returns how many rounds this rank can never take one by one, because their results were forgotten or added up: the
  // largest number among the buckets of a family, or 0 if no bucket exists.
  Round Lost(const Family& family) const;
  // Counts in the statistics that the ranks had different models after a flush, and were given equal models again.
  void CountHealed(const Family& family) const;

 private:
  int RoundsToTake(const Buckets& family, bool takes) const;

  Surroundings& surroundings_;
  const BucketMap& buckets_;
  const Flush& flush_;
  std::atomic<bool> has_warned_{false};  // true if the log has warned that results were added up
};

// While an object of this class lives, the thread that steps an optimizer waits for something else, and meanwhile takes
// the results of `buckets`. If one of these buckets has as many untaken results as it may have, no round of it closes
// until it has fewer. Only that thread may make such an object. Objects may be nested.
class Draining : private NonCopyable {
 public:
  explicit Draining(Buckets buckets) : buckets_(std::move(buckets)) { Add(1); }
  ~Draining() { Add(-1); }

 private:
  void Add(int waits) const;

  const Buckets buckets_;
};

}  // namespace horovod_partial
