// Walks through everything that a simulated job may do.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace horovod_partial::test {

// The job does not do what it should.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void Require(bool condition, const char* what) {
  if (!condition) throw Violation(what);
}

struct Exploration {
  std::size_t states = 0;
  std::size_t ends = 0;   // states in which every rank has come to the end of its program
  std::string violation;  // the first one, or empty
  std::string trace;      // how it came about
};

// Depth first, each state once. A world can be copied, and has these:
//   Moves()            what may happen next
//   Apply(move)        lets it happen; throws Violation if it goes wrong
//   Describe(move)     in words
//   Key()              all that the future depends on
//   AtStartOfCycle()   whether the background threads begin another cycle
//   Stuck()            whether no application can move before they have
//   CheckProgress()    throws Violation if nothing will ever happen again, although the world is stuck
//   Done()             whether all programs have ended
//   CheckEnd()         throws Violation if something is missing then
template <class World>
Exploration Explore(World start) {
  struct Frame {
    World world;
    decltype(start.Moves()) moves;
    std::size_t next = 0;
  };
  Exploration result;
  std::unordered_set<std::string> seen;
  std::vector<Frame> path;
  const auto enter = [&](World world) {
    if (!seen.insert(world.Key()).second) return;
    if (world.AtStartOfCycle() && world.Done()) {
      ++result.ends;
      world.CheckEnd();
      return;
    }
    if (world.AtStartOfCycle() && world.Stuck()) world.CheckProgress();
    auto moves = world.Moves();
    path.push_back({std::move(world), std::move(moves)});
  };
  try {
    enter(std::move(start));
    while (!path.empty()) {
      Frame& frame = path.back();
      if (frame.next == frame.moves.size()) {
        path.pop_back();
        continue;
      }
      World world = frame.world;
      world.Apply(frame.moves[frame.next++]);
      // As long as there is but one move, it is taken: such steps leave no state behind.
      for (auto moves = world.Moves(); !world.AtStartOfCycle() && moves.size() == 1; moves = world.Moves())
        world.Apply(moves[0]);
      enter(std::move(world));
    }
  } catch (const Violation& violation) {
    result.violation = violation.what();
    for (const Frame& frame : path)
      if (frame.next > 0) result.trace += "\n  " + frame.world.Describe(frame.moves[frame.next - 1]);
  }
  result.states = seen.size();
  return result;
}

}  // namespace horovod_partial::test
