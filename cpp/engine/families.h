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
struct Member {
  std::string bucket;
  void* output = nullptr;
};

// Rounds that a family has taken as one step: one round normally, more if results had to be added up.
struct TakenRounds {
  int rounds = 0;
  int gradients = 0;  // the number of gradients in all buckets; if 0, there is no update
};

// Called by the application's threads. It never holds the locks of several buckets at once. That is safe, because
// meanwhile other threads can only add newer rounds.
class Families {
 public:
  Families(Surroundings& surroundings, const BucketMap& buckets, const Flush& flush)
      : surroundings_(surroundings), buckets_(buckets), flush_(flush) {}

  // Takes the oldest untaken round that has ended in all buckets of a family on this rank, and writes its results to
  // the given outputs. Returns nothing if there is no such round, or if this rank's flush ends before it. Only the
  // thread that contributes to the family may call this.
  std::optional<TakenRounds> TakeRound(const std::vector<Member>& family);
  bool HasRound(const Family& family) const;
  // Returns true if there is a round to take, and room for at most one more result.
  bool IsNearlyFull(const Family& family) const;
  // Tells that the calling thread will contribute to these buckets next, even if other threads did so before.
  void Claim(const Family& family) const;
  // Forgets late contributions and missed results of these buckets on this rank. If a round has ended in some of the
  // buckets but not in all, its number is kept, so that all buckets stay at the same round.
  void Clear(const Family& family);
  // Returns how many rounds this rank can never take one by one: the largest number among the buckets, or 0 if no
  // bucket exists.
  Round Lost(const Family& family) const;

 private:
  int RoundsToTake(const Buckets& family, bool takes) const;

  Surroundings& surroundings_;
  const BucketMap& buckets_;
  const Flush& flush_;
  std::atomic<bool> has_warned_{false};  // true if the log has told of rounds that were added up
};

// While this object lives, the calling thread waits (for other buckets, in a flush or for a micro-batch), and takes the
// results of these buckets meanwhile. While a bucket has as many untaken results as it may have, no round of it closes.
// Only the thread that steps the optimizer may do this. The waits may be nested.
class Draining {
 public:
  explicit Draining(Buckets buckets) : buckets_(std::move(buckets)) { Add(1); }
  ~Draining() { Add(-1); }
  Draining(const Draining&) = delete;
  Draining& operator=(const Draining&) = delete;

 private:
  void Add(int waits) const;

  const Buckets buckets_;
};

}  // namespace horovod_partial
