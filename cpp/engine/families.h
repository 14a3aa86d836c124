// Families: buckets whose results are taken together, in one step (docs/protocol.md, families).
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "engine/bucket_map.h"
#include "engine/flush.h"
#include "engine/surroundings.h"

namespace horovod_partial {

// A bucket of a family, and the memory for its result when a round is taken.
struct FamilyBucket {
  std::string bucket;
  void* output = nullptr;
};

// The rounds that a family takes as one step: one round normally, more if results had to be added up.
struct TakenRounds {
  int rounds = 0;
  int gradients = 0;  // the number of gradients in the results of all buckets; if 0, there is nothing to apply
};

// Takes rounds of families, on threads of the application. Its functions lock one bucket of a family at a time. That is
// safe, because other threads can meanwhile only add newer rounds.
class Families {
 public:
  Families(Surroundings& surroundings, const BucketMap& buckets, const Flush& flush)
      : surroundings_(surroundings), buckets_(buckets), flush_(flush) {}

  // Takes the oldest untaken round that has ended in all buckets of a family on this rank, and writes its results to
  // the given outputs. Returns nothing if there is no such round, or if the round comes after this rank's flush. Only
  // the thread that contributes to the family may call this.
  std::optional<TakenRounds> TakeRound(const std::vector<FamilyBucket>& family);
  bool HasRound(const Family& family) const;
  // Returns true if a family has a round to take, and one of its buckets has room for at most one more untaken result.
  bool IsNearlyFull(const Family& family) const;
  // Records that the calling thread will contribute to a family next, even if other threads did so before.
  void Claim(const Family& family) const;
  // Forgets late contributions and missed results of a family on this rank. A round that has ended in some of its
  // buckets but not in all keeps its number without a result, so that all buckets stay at the same round.
  void Clear(const Family& family);
  // Returns how many rounds have ended on this rank in all buckets of a family. With replay: how many it has taken.
  Round Taken(const Family& family) const;
  // Returns the number of lost rounds of a family on this rank: the largest number among its buckets, or 0 if no bucket
  // exists.
  Round Lost(const Family& family) const;
  // Counts in the statistics of a family's buckets that the replica was healed.
  void CountHealed(const Family& family) const;

 private:
  int RoundsToTake(const Buckets& family, bool takes) const;

  Surroundings& surroundings_;
  const BucketMap& buckets_;
  const Flush& flush_;
  std::atomic<bool> has_warned_{false};  // true if the log has warned that rounds were added up
};

// While an object of this class lives, a thread waits in a flush, for other buckets or for a micro-batch, and meanwhile
// takes the results of `buckets`. If one of these buckets has as many untaken results as it may have, no round of it
// closes. Only the thread that steps the optimizer may make such an object. Objects may be nested.
class Draining : private NonCopyable {
 public:
  explicit Draining(Buckets buckets) : buckets_(std::move(buckets)) { Add(1); }
  ~Draining() { Add(-1); }

 private:
  void Add(int waits) const;

  const Buckets buckets_;
};

}  // namespace horovod_partial
