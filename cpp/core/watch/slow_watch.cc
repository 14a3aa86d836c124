#include "core/watch/slow_watch.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>

namespace horovod_partial {
namespace {

constexpr std::size_t kMostAtOnce = 100'000;  // one call of Pass compares about this many compute times at most
constexpr double kRecent = 0.2;               // the weight of the newest heartbeat in the means of the signs
constexpr double kLeastStolen = 0.05, kLeastThrottled = 0.01, kLeastPressure = 0.1;  // smaller shares are not logged

void Average(double& mean, double value) {
  if (value < 0) return;
  mean = mean < 0 ? value : mean + kRecent * (value - mean);
}

}  // namespace

void SlowWatch::Says(Rank rank, const Beat& beat) {
  rows_.SetOut(rank, beat.activity.kind == Activity::Kind::kResting);
  rows_.Add(rank, beat.steps.ended);
  WatchedRank& watched = ranks_[Index(rank)];
  for (const TimedStep& step : beat.steps.ended) {
    watched.compute_seconds += step.seconds;
    for (std::size_t part = 0; part < step.parts.seconds.size(); ++part)
      if (double& sum = watched.parts.seconds[part]; step.parts.seconds[part] >= 0)
        sum = std::max(sum, 0.0) + step.parts.seconds[part];
  }
  watched.steps += static_cast<std::int64_t>(beat.steps.ended.size());
  watched.step_seconds += beat.steps.seconds;
  watched.bytes += beat.steps.bytes;
  MachineSigns& signs = watched.signs;
  Average(signs.processors, beat.signs.processors);
  Average(signs.stolen, beat.signs.stolen);
  Average(signs.throttled, beat.signs.throttled);
  Average(signs.pressure, beat.signs.pressure);
}

std::string SlowWatch::Pass() {
  std::string told;
  for (const StepRows::Row& row : rows_.Take(1 + kMostAtOnce / ranks_.size())) {
    parts_.Step(row.parts);
    for (const SlowRanks::News& news : slow_.Step(row.seconds)) told += (told.empty() ? "" : "; ") + Describe(news);
  }
  return told;
}

std::vector<WatchedRank> SlowWatch::ranks() const {
  const auto has_told = [](const WatchedRank& watched) { return watched.steps > 0 || watched.bytes > 0; };
  if (std::none_of(ranks_.begin(), ranks_.end(), has_told)) return {};
  std::vector<WatchedRank> ranks = ranks_;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank].slowness = slow_.present(static_cast<Rank>(rank));
    if (ranks[rank].slowness) ranks[rank].part = parts_.CauseOf(static_cast<Rank>(rank)).part;
  }
  return ranks;
}

std::string SlowWatch::Describe(const SlowRanks::News& news) const {
  std::string line = "rank " + std::to_string(news.slowness.rank) + ' ' + news.slowness.Describe();
  if (news.change == SlowRank::Change::kEnds)
    return line + (news.slowness.kind == SlownessKind::kPauses ? ", and pauses no more" : ", and is not slow any more");
  const Rank rank = news.slowness.rank;
  return line + parts_.CauseOf(rank).text + horovod_partial::Describe(ranks_[Index(rank)].signs);
}

std::string Describe(const MachineSigns& signs) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1);
  if (signs.processors >= 0) text << " (it uses " << signs.processors << " processors";
  const auto tell = [&](double share, double least, const char* what, const char* of) {
    if (share < least) return;
    text << (text.tellp() > 0 ? "; " : " (") << what << ' ' << std::lround(100 * share) << " % of " << of;
  };
  tell(signs.throttled, kLeastThrottled, "its cgroup is throttled in", "the scheduling periods");
  tell(signs.stolen, kLeastStolen, "the hypervisor of its host takes", "the processor time");
  tell(signs.pressure, kLeastPressure, "processes on its host wait for a processor", "the time");
  if (text.tellp() > 0) text << ')';
  return text.str();
}

}  // namespace horovod_partial
