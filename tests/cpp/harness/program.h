// What the ranks of a simulated job do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace horovod_partial::test {

struct Op {
  enum class Kind : std::uint8_t {
    kArrive,   // at `bucket`, with a gradient
    kWait,     // for the outstanding arrival at `bucket`
    kTake,     // all rounds that have ended in all members of the family
    kDeliver,  // Engine::Deliver, for one bucket, or for the family
    kFlush,    // Engine::Flush, then collect what was missed; a family is taken from meanwhile
    kEnd,      // Engine::End, once all other threads have ended, then collect what was missed
    kForeign,  // a collective that is not ours: waits until every rank has come to it; takes rounds meanwhile
    kJoin,     // Horovod's join: waits until every rank has joined
    kClear,    // Engine::Clear, for one bucket of which nothing is outstanding, or for the family
    kMeet,     // waits until every thread of the rank has come to it: a queue, of which nobody else knows
  };
  Kind kind;
  int bucket = 0;

  bool operator==(const Op& other) const { return kind == other.kind && bucket == other.bucket; }
};
using Program = std::vector<Op>;
using Process = std::vector<Program>;  // one for each thread; the first one ends the process

inline std::string NameOf(int bucket) { return std::string(1, static_cast<char>('a' + bucket)); }

inline constexpr int kMostBuckets = 3;
inline constexpr int kMostRanks = 3;
inline constexpr int kMostSteps = 3;
inline constexpr int kMostThreads = 2;

}  // namespace horovod_partial::test
