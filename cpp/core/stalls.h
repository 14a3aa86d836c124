// Whether ranks have waited for too long, and for whom (docs/protocol.md, rule 14).
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/activity.h"
#include "core/types.h"

namespace horovod_partial {

// A wait that has lasted, as rank 0 knows it.
struct Stall {
  int intervals = 0;                              // for which the longest of the waits has lasted, at least
  std::map<std::string, std::set<Rank>> waiting;  // by what they wait for
  std::set<Rank> computing;                       // are waited for, and live
  std::map<Rank, int> silent;  // are waited for, and for so many intervals have given no sign of life
  std::map<std::string, std::set<Rank>> resting;  // by where
  std::set<Rank> gone;                            // whose process has ended, or has left the job

  // Who writes its stacks: whoever is in it and can.
  std::set<Rank> Writers() const;
  // All in one line, for the log of rank 0.
  std::string Describe(Time interval) const;
};

// For the log: so many intervals in seconds; and what a rank does in a wait.
std::string Lasted(int intervals, Time interval);
std::string Describe(const Activity& own, Time interval);

// When a stall is told: once, and the next one not before ten times the limit has passed.
class Telling {
 public:
  // The limit is in intervals.
  explicit Telling(int limit) : pause_(10 * limit) {}

  // An interval has passed. Whether to tell now; `due`: there is something to tell.
  bool Begins(bool due);
  // Whether what was told of is over now; `lasts`: it is not.
  bool Ends(bool lasts);

 private:
  const int pause_;
  int quiet_ = 0;  // intervals in which nothing may be told
  bool told_ = false;
};

// Rank 0's watch over all ranks' waits, its own among them. Time is counted in intervals of its own, as by Heartbeats.
// A wait is told when it has lasted for 7 to 10 tenths of the limit: by then each rank that lives has said what it
// does.
class StallWatch {
 public:
  // The limit is in intervals, at least 10.
  explicit StallWatch(int limit) : limit_(limit), telling_(limit) {}

  // A sign of life. The first one begins the watch over a rank.
  void Says(Rank rank, Activity activity);
  // The rank's process has ended, or takes part no more.
  void Gone(Rank rank);

  struct News {
    std::optional<Stall> begins;
    bool ends = false;
  };
  // An interval has passed.
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
  int seen_ = 0;  // intervals in a row at whose ends there was a stall
  std::map<Rank, Member> members_;
};

// Another rank's watch, for where rank 0 is the one that is stopped.
class LonelyWatch {
 public:
  explicit LonelyWatch(int limit) : limit_(limit), telling_(limit) {}

  // An interval has passed: whether this rank waits, or its Horovod is held up, for long, and rank 0 has been silent.
  bool Pass(int silence, const Activity& own, int held);

 private:
  const int limit_;
  Telling telling_;
};

}  // namespace horovod_partial
