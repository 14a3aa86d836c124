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

// One bucket of a family, and the memory for its result when a round is taken.
struct Member {
  std::string bucket;
  void* output = nullptr;
};

// The rounds that a family has taken as one step: 1 normally, more if results had to be added up.
struct TakenRounds {
  int rounds = 0;
  int gradients = 0;  // in all members; 0: there is no update
};

// Called by the application's threads. It never holds the locks of several members at once. That is safe, because
// meanwhile rounds can only be added behind those that are there.
class Families {
 public:
  Families(Surroundings& surroundings, const BucketMap& buckets, const Flush& flush)
      : surroundings_(surroundings), buckets_(buckets), flush_(flush) {}

  // Takes the oldest untaken round that has ended in all members of a family on this rank, and writes its results to
  // the members' outputs. Returns nothing if there is no such round, or the flush of this rank ends before it. Only the
  // thread that contributes to the family may call this.
  std::optional<TakenRounds> TakeRound(const std::vector<Member>& family);
  bool HasRound(const Family& family) const;
  // True if there is a round to take, and room for at most one more result.
  bool IsNearlyFull(const Family& family) const;
  // The calling thread will contribute to these buckets next, even if other threads did so before.
  void Claim(const Family& family) const;
  // Forgets late contributions and missed results of these buckets on this rank. A round that has not ended in all
  // buckets keeps its number, so that they stay together.
  void Clear(const Family& family);
  // Returns the largest Bucket::lost of these buckets, or 0 if none of them exists.
  Round Lost(const Family& family) const;

 private:
  int RoundsToTake(const Buckets& family, bool takes) const;

  Surroundings& surroundings_;
  const BucketMap& buckets_;
  const Flush& flush_;
  std::atomic<bool> has_warned_{false};  // of rounds that had to be added up
};

// While this object lives, the calling thread waits for something else, and takes the results of these buckets
// meanwhile. While one of them is full, none of its rounds closes. Only the thread that takes their families' steps may
// do this. Such waits may be nested.
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
