// One arrival and its result.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/rounds/bucket.h"
#include "core/values/buffer.h"
#include "core/values/types.h"

namespace horovod_partial {

struct RoundInfo {
  Round round = -1;       // the round whose result the caller got; the newest, if there were several
  bool late = false;      // the caller's contribution goes into a later round
  int fresh = 0;          // contributors that were on time in that round, in the caller's group
  int gradients = 0;      // gradients in the sum of that round, in the caller's group
  int staleness = 0;      // rounds that the caller had missed when it arrived
  bool empty = false;     // no missed round had a result: what the caller gets is no update
  Members members;        // the ranks whose contributions are in that sum
  std::vector<int> work;  // the work that each of them reported
};

// The bucket's lock guards the members until the operation is done. After that nothing changes.
struct Operation : std::enable_shared_from_this<Operation> {
  Bucket::Arrival arrival;
  bool done = false;
  std::string error;
  RoundInfo info;
  Buffer scratch;         // takes the result if the caller gave no output
  bool recorded = false;  // the arrival is in the recording, so the result belongs there too
  // For callers that do not wait: called once, when the operation is done, by the thread that has completed it and
  // without a lock of the engine. It may read the operation. It must not block, and must not call the engine.
  std::function<void(const Operation&)> on_done;
};

}  // namespace horovod_partial
