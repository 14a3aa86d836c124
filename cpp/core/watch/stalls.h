// Finds waits that last too long, and the ranks that they wait for (docs/protocol.md, rule 14).
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/values/types.h"
#include "core/watch/activity.h"

namespace horovod_partial {

// Waits that have lasted too long, as rank 0 knows them.
struct Stall {
  int intervals = 0;                              // how long the longest of the waits has lasted at least
  std::map<std::string, std::set<Rank>> waiting;  // ranks by what they wait for
  std::set<Rank> computing;                       // ranks that are waited for, and live
  std::map<Rank, int> silent;  // ranks that are waited for: how many intervals without a sign of life
  std::map<std::string, std::set<Rank>> resting;  // ranks by where they rest
  std::set<Rank> gone;                            // ranks whose process has ended or has left the job

  // The ranks that write their stacks to standard error: those that wait or compute.
  std::set<Rank> Writers() const;
  // Describes all of it in one line, for the log of rank 0.
  std::string Describe(Time interval) const;
};

// For the log: a number of intervals in seconds; and what a rank does in a wait.
std::string Lasted(int intervals, Time interval);
std::string Describe(const Activity& own, Time interval);

// Limits how often a stall is logged: once, and the next one not before ten times the limit has passed.
class Telling {
 public:
  // `limit` is in intervals.
  explicit Telling(int limit) : pause_(10 * limit) {}

  // Call it in each interval. Returns true if the stall is to be logged now. `due`: there is a stall.
  bool Begins(bool due);
  // Returns true if the stall that was logged is over now. `lasts`: it is not.
  bool Ends(bool lasts);

 private:
  const int pause_;
  int quiet_ = 0;  // intervals until the next one may be logged
  bool told_ = false;
};

// Rank 0's watch over the waits of all ranks, including its own. It counts time in its own intervals, like Heartbeats.
// A wait is logged when it has lasted for 7 to 10 tenths of the limit: by then each living rank has said what it does.
class StallWatch {
 public:
  // `limit` is in intervals, at least 10.
  explicit StallWatch(int limit) : limit_(limit), telling_(limit) {}

  // Call it for each sign of life. The first one begins the watch over a rank.
  void Says(Rank rank, Activity activity);
  // The rank's process has ended, or takes part no more.
  void Gone(Rank rank);

  struct News {
    std::optional<Stall> begins;
    bool ends = false;
  };
  // Call it in each interval.
  News Pass();

 private:
  struct Member {
    Activity activity;
    int silent = 0;
    bool gone = false;
  };
  bool Lasts(const Activity& activity) const;
  bool IsHeard(const Member& member) const;
  Stall Find() const;

  const int limit_;
  Telling telling_;
  int seen_ = 0;  // how many intervals in a row have ended with a stall
  std::map<Rank, Member> members_;
};

// The watch of another rank, for the case that rank 0 itself is stopped.
class LonelyWatch {
 public:
  explicit LonelyWatch(int limit) : limit_(limit), telling_(limit) {}

  // Call it in each interval. Returns true if this rank has waited, or its Horovod was held up, for too long, and rank
  // 0 has been silent. `silence`, `held`: in intervals.
  bool Pass(int silence, const Activity& own, int held);

 private:
  const int limit_;
  Telling telling_;
};

}  // namespace horovod_partial
