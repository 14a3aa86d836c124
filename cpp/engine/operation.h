// One arrival (a rank hands over its contribution to a bucket) and its result.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/rounds/bucket.h"
#include "core/values/memory.h"
#include "core/values/types.h"

namespace horovod_partial {

struct RoundInfo {
  Round round = -1;       // the number of the round that gave the result; of several rounds, the newest
  bool late = false;      // true if the contribution goes into a later round
  int fresh = 0;          // the number of ranks of the caller's group that were on time in the round
  int gradients = 0;      // the number of gradients of the caller's group in the result
  int staleness = 0;      // the number of rounds that the caller had missed when it arrived
  bool empty = false;     // true if no missed round had gradients, so that there is nothing to apply
  Members members;        // the ranks that have contributed to the result
  std::vector<int> work;  // for each of `members`: the number of steps or the iteration that it reported
};

// An arrival and its result. The bucket's lock guards the members until the operation is done. Then they never change.
struct Operation : std::enable_shared_from_this<Operation> {
  Bucket::Arrival arrival;
  bool done = false;
  std::string error;
  RoundInfo info;
  Buffer scratch;         // memory for the result if the caller gave no output
  bool recorded = false;  // true if the arrival was recorded, so that the result must be recorded too
  // A function for callers that do not wait. The thread that completes the operation calls it once, when that thread
  // holds no bucket's lock. The function may read the operation, but must not block or call functions of Engine.
  std::function<void(const Operation&)> on_done;
};

}  // namespace horovod_partial
