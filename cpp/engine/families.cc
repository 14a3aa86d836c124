#include "engine/families.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>

#include "engine/log.h"
#include "engine/shared_bucket.h"

namespace horovod_partial {
namespace {

// Returns true if the result of some bucket is not where the application wants it.
bool Writes(const Buckets& buckets, int rounds, const std::vector<void*>& outputs) {
  bool writes = false;
  std::size_t i = 0;
  ForEachLocked(buckets, [&](const SharedBucket& bucket) {
    writes = writes || bucket.core.Writes(rounds, outputs.at(i));
    ++i;
  });
  return writes;
}

}  // namespace

// Returns how many rounds of a family the application must apply as one step: normally 1, and more if results were
// added up. Returns 0 if no untaken round has ended in every bucket, or if the round comes after the flush in which
// this rank is. With `takes` no more results are added up until the caller has taken the rounds.
int Families::RoundsToTake(const Buckets& family, bool takes) const {
  int rounds = 1;
  int least = std::numeric_limits<int>::max();
  Round before = kForEver;  // the number of rounds that this rank may still take in its flush
  ForEachLocked(family, [&](SharedBucket& bucket) {
    if (takes) bucket.core.BeTaken(true);
    rounds = std::max(rounds, bucket.core.oldest_rounds());
    least = std::min(least, bucket.core.untaken());
    if (flush_.bounds()) before = std::min(before, bucket.flush_end - bucket.core.taken());
  });
  return !family.empty() && rounds <= least && rounds <= before ? rounds : 0;
}

bool Families::HasRound(const Family& family) const { return RoundsToTake(buckets_.FindAll(family), false) > 0; }

bool Families::IsNearlyFull(const Family& family) const {
  const Buckets buckets = buckets_.FindAll(family);
  bool is_nearly_full = false;
  ForEachLocked(buckets, [&](SharedBucket& bucket) {
    is_nearly_full |= bucket.core.untaken() + 1 >= bucket.core.options().replay_limit;
  });
  return is_nearly_full && RoundsToTake(buckets, false) > 0;
}

// A bucket with too many untaken results (results that the application has not taken yet) adds up the two oldest.
// TakeRound takes results from one bucket after the other, and must get the same rounds from all of them. So
// RoundsToTake forbids these buckets to add up results. At the end, also after an exception, they may do so again.
std::optional<int> Families::TakeRound(const Family& family, const std::vector<void*>& outputs,
                                       const std::function<void()>& before_writing) {
  const Buckets buckets = buckets_.FindAll(family);
  const std::shared_ptr<void> end(
      nullptr, [&](void*) { ForEachLocked(buckets, [](SharedBucket& bucket) { bucket.core.BeTaken(false); }); });
  const int rounds = RoundsToTake(buckets, true);
  if (rounds == 0) return std::nullopt;
  if (before_writing && Writes(buckets, rounds, outputs)) before_writing();
  int gradients = 0;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    SharedBucket& bucket = *buckets[i];
    BucketLock lock(bucket.mutex);
    // This rank may take the results of a flush even if the bucket has failed since. For example, another rank may have
    // ended and shut Horovod down.
    const bool is_flushed = flush_.bounds() && bucket.flush_end != kForEver;
    if (!bucket.poison.empty() && !is_flushed) throw EngineError(bucket.poison);
    if (bucket.core.full()) surroundings_.news = true;  // other ranks may wait until this bucket has room for results
    try {
      gradients += bucket.core.TakeRounds(rounds, outputs.at(i));
    } catch (const std::exception& error) {  // an error leaves the family's buckets at different rounds
      bucket.FailAndThrow(error, lock);
    }
  }
  if (rounds > 1 && !has_warned_.exchange(true)) {
    Log(LogLevel::kWarning, surroundings_.rank,
        "this rank was blocked, in a collective of Horovod's or a wait for another optimizer, while others trained: " +
            std::to_string(rounds) + " rounds of " + family.front() +
            " had to be applied as one step, so that its model may differ until the next flush. Call optimizer.flush() "
            "on every rank before, say, a long evaluation on one, or give the policy a larger replay_limit");
  }
  return gradients;
}

void Families::Claim(const Family& family) const {
  ForEachLocked(buckets_.FindAll(family), [](SharedBucket& bucket) { bucket.arrivals.Claim(bucket.core.completed()); });
}

void Families::Clear(const Family& family) {
  const Buckets buckets = buckets_.FindAll(family);
  Round complete = kForEver;
  ForEachLocked(buckets, [&](SharedBucket& bucket) { complete = std::min(complete, bucket.core.completed()); });
  ForEachLocked(buckets, [&](SharedBucket& bucket) { bucket.core.Clear(complete); });
  surroundings_.news = true;  // other ranks may wait until these buckets have room for results
}

Round Families::Taken(const Family& family) const {
  const Buckets buckets = buckets_.FindAll(family);
  Round taken = buckets.empty() ? 0 : kForEver;
  ForEachLocked(buckets, [&](SharedBucket& bucket) { taken = std::min(taken, bucket.core.taken()); });
  return taken;
}

Round Families::Lost(const Family& family) const {
  Round lost = 0;
  for (const std::string& name : family) {
    const auto bucket = buckets_.Find(name);
    if (bucket == nullptr) continue;
    std::lock_guard<std::mutex> lock(bucket->mutex);
    lost = std::max(lost, bucket->core.lost());
  }
  return lost;
}

void Families::CountHealed(const Family& family) const {
  ForEachLocked(buckets_.FindAll(family), [](SharedBucket& bucket) { ++bucket.statistics.healed; });
}

void Draining::Add(int waits) const {
  ForEachLocked(buckets_, [&](SharedBucket& bucket) { bucket.draining += waits; });
}

}  // namespace horovod_partial
