// Finds waits that last too long, and the ranks that they wait for (docs/protocol.md, rule 14).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "core/values/types.h"
#include "core/watch/activity.h"

namespace horovod_partial {

// The waits that have lasted too long, and the ranks that they need, as far as rank 0 knows.
struct Stall {
  int intervals = 0;                              // the longest wait has lasted at least this many heartbeat intervals
  std::map<std::string, std::set<Rank>> waiting;  // the ranks that wait, by what they wait for
  std::set<Rank> computing;                       // ranks that compute while others wait for them
  std::map<Rank, int> silent;  // ranks that others wait for, and for how many intervals they have sent no heartbeat
  std::map<std::string, std::set<Rank>> resting;  // ranks that have joined or ended, by a text that says so
  std::set<Rank> gone;                            // ranks whose process has ended or has left the job

  // Returns the ranks that must write their stacks to standard error: all in this stall that wait or compute.
  std::set<Rank> Writers() const;
  // Describes the stall in one line, for the log of rank 0.
  std::string Describe(Time interval) const;
};

// Texts for the log. Lasted: the seconds in so many intervals. Describe: how long a rank has waited, and for what.
std::string Lasted(int intervals, Time interval);
std::string Describe(const Activity& own, Time interval);

// Limits how often stalls are logged: between two logged stalls lie at least ten times `limit` intervals.
class Telling {
 public:
  explicit Telling(int limit) : pause_(std::int64_t{10} * limit) {}

  // Must be called in each heartbeat interval. `due`: true if there is a stall. Returns true if it must be logged now.
  bool Begins(bool due);
  // `lasts` says whether the stall lasts. Returns true if a stall that was logged is over now.
  bool Ends(bool lasts) { return !lasts && std::exchange(told_, false); }

 private:
  const std::int64_t pause_;
  std::int64_t quiet_ = 0;  // the number of heartbeat intervals until a stall may be logged again
  bool told_ = false;
};

// Rank 0 watches over the waits of all ranks, including its own. Time is counted in heartbeat intervals of rank 0. A
// wait is logged when it has lasted for 7 to 10 tenths of the limit. By then each living rank has said what it does.
class StallWatch {
 public:
  // `limit` is 10 or more. A wait is logged before it has lasted for this many heartbeat intervals.
  explicit StallWatch(int limit) : limit_(limit), telling_(limit) {}

  // Records a heartbeat and what its rank is doing. The first heartbeat of a rank begins the watch over it.
  void Says(Rank rank, Activity activity) { members_[rank] = {std::move(activity), 0, false}; }
  // Records that the process of a rank has ended, or gives no more heartbeats.
  void Gone(Rank rank) { members_[rank].gone = true; }

  struct News {
    std::optional<Stall> begins;
    bool ends = false;
  };
  // Must be called at the end of each heartbeat interval. Returns what must be logged now.
  News Pass();

 private:
  struct WatchedRank {
    Activity activity;
    int silent = 0;
    bool gone = false;
  };
  bool Lasts(const Activity& activity) const;
  bool IsHeard(const WatchedRank& member) const;
  Stall Find() const;

  const int limit_;
  Telling telling_;
  int seen_ = 0;  // the number of heartbeat intervals in a row that ended with a stall
  std::map<Rank, WatchedRank> members_;
};

// Each rank but rank 0 watches over rank 0, because a rank 0 that is stopped cannot log the waits of the others.
class LonelyWatch {
 public:
  explicit LonelyWatch(int limit) : limit_(limit), telling_(limit) {}

  // Must be called in each heartbeat interval. Rank 0 has sent no heartbeat for `silence` intervals, and this rank has
  // begun no cycle of Horovod for `held` intervals. `own` says how long this rank has waited. Returns true if this rank
  // must log now that rank 0 is silent: the silence is too long, and this rank has waited, or begun no cycle, for
  // nearly the limit.
  bool Pass(int silence, const Activity& own, int held);

 private:
  const int limit_;
  Telling telling_;
};

}  // namespace horovod_partial
