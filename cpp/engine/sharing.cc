#include "engine/sharing.h"

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "engine/shared_bucket.h"

namespace horovod_partial {
namespace {

bool IsAwaited(const Buckets& family) {
  return std::any_of(family.begin(), family.end(), [](const auto& bucket) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    return !bucket->awaited.empty();
  });
}

}  // namespace

std::optional<std::pair<int, int>> WorkSharing::Take(const Buckets& family, bool begins) {
  SharedBucket& keeper = *family.front();
  Round update;
  {
    std::lock_guard<std::mutex> lock(keeper.mutex);
    update = keeper.update;
  }
  for (const auto& bucket : family) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    if (!bucket->poison.empty()) throw EngineError(bucket->poison);
    if (bucket->core.taken() != update) return std::nullopt;
  }
  std::pair<int, int> next;
  bool holds_more;
  {
    // The update may have closed since its number was read. Then this rank must take results before it may begin more.
    std::lock_guard<std::mutex> lock(keeper.mutex);
    if (leaving_ > 0 || has_left_ || keeper.update != update || !keeper.share->MayBegin()) return std::nullopt;
    if (!keeper.MayQueue()) return std::nullopt;
    next = {keeper.share->next(), keeper.updates};
    if (!begins) return next;
    keeper.share->Begin(Now());
    holds_more = keeper.share->MayBegin();
    if (holds_more && keeper.holds_more) return next;
  }
  ForEachLocked(family, [&](SharedBucket& bucket) { bucket.holds_more = holds_more; });
  // Since then the coordinator may have taken micro-batches back, or another thread may leave. Both ask for reports.
  std::unique_lock<std::mutex> lock(keeper.mutex);
  const bool is_stale = holds_more && (leaving_ > 0 || !keeper.share->MayBegin());
  lock.unlock();
  if (is_stale) ReportSoon();
  return next;
}

std::optional<std::pair<int, int>> WorkSharing::Next(const Family& names, bool begins, const IsDue& is_due) {
  const Buckets family = buckets_.FindAll(names);
  if (family.empty()) {
    const std::string refusal = buckets_.refusal();
    if (!refusal.empty()) throw EngineError(refusal);  // this rank's arrival has failed; no other wait reports why
    throw std::invalid_argument("no micro-batch can begin before its buckets have been declared");
  }
  SharedBucket& keeper = *family.front();
  const Draining draining(family);  // reports now tell other ranks that the caller takes rounds while it waits
  Time start{0};
  const auto tell = [&](bool wants) {
    std::lock_guard<std::mutex> lock(keeper.mutex);
    if (std::exchange(keeper.wants, wants) == wants) return;
    const Time now = Now();
    if (wants) {
      start = now;
      return keeper.arrivals.BeginWait(now);
    }
    keeper.arrivals.EndWait(true, keeper.core.completed(), now);
    keeper.statistics.waited_seconds += ToSeconds(now - start);
    if (auto* recorder = surroundings_.Recording()) recorder->Waited(start, now, true);
  };
  const std::shared_ptr<void> ends(nullptr, [&](void*) { tell(false); });
  while (true) {
    const std::uint64_t seen = surroundings_.changes.count();
    if (families_.HasRound(names)) return std::nullopt;
    if (const auto next = Take(family, begins)) return next;
    if (is_due && is_due()) return std::nullopt;
    tell(!IsAwaited(family));  // while a device still computes a contribution, the rank does not wait for a micro-batch
    if (!surroundings_.collectives.Alive()) surroundings_.ThrowShutDown();
    if (!surroundings_.changes.Await(seen, PatienceOf(is_due))) surroundings_.collectives.Interrupt();
  }
}

void WorkSharing::Return(const std::string& name) {
  const auto bucket = buckets_.Find(name);
  if (bucket == nullptr) return;
  std::lock_guard<std::mutex> lock(bucket->mutex);
  if (!bucket->share || bucket->share->begun() <= bucket->Queued()) return;
  bucket->share->Return();
  surroundings_.news = true;
}

void WorkSharing::ReportSoon() {
  ForEachLocked(buckets_.All(), [](SharedBucket& bucket) { bucket.holds_more = false; });
  surroundings_.news = true;  // after that, so that the next report has each arrival that has not asked for it
}

bool WorkSharing::ReportLeaves() {
  const bool had_left = has_left_.exchange(false);
  if (leaving_ == 0 || !surroundings_.shares_work) {
    if (had_left) surroundings_.changes.Tell();  // a thread may wait to begin a micro-batch again
    return false;
  }
  has_left_ = true;  // has_left_ is set before the buckets are checked, so that no micro-batch begins after the check
  for (const auto& bucket : buckets_.All()) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    const bool open = bucket->share && bucket->share->begun() != bucket->Made();
    if (bucket->SharesWork() && (open || !bucket->awaited.empty())) return has_left_ = false;
  }
  return true;
}

void WorkSharing::Hear(const std::vector<Grants>& grants) {
  bool fewer = false;
  for (const Grants& each : grants) {
    const auto bucket = buckets_.Find(each.bucket);
    if (bucket == nullptr) continue;
    std::lock_guard<std::mutex> lock(bucket->mutex);
    if (bucket->share && bucket->share->Hear(each.by_rank.at(Index(surroundings_.rank)))) fewer = true;
  }
  if (fewer) ReportSoon();  // the coordinator waits for the report that this rank holds fewer
  surroundings_.changes.Tell();
}

}  // namespace horovod_partial
