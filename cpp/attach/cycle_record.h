// Writes to a rank's recording what Horovod's cycles do in one process set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attach/coordination.h"
#include "attach/horovod.h"
#include "core/rounds/message.h"
#include "recording/recorder.h"

namespace horovod_partial::attach {

// Used by Horovod's background thread only, so it has no lock.
class CycleRecord {
 public:
  CycleRecord(hvd::Controller& controller, std::int32_t process_set_id, std::shared_ptr<recording::Recorder> recorder)
      : controller_(controller), process_set_id_(process_set_id), recorder_(std::move(recorder)) {}

  // Records whether tensors of Horovod's own operations have been submitted since the last call. Some may be missed if
  // an operation other than an allreduce has ended meanwhile.
  void Handed(Time now);
  void Decided(const std::vector<Closing>& closings, const Coordination& coordination, Time now) const;
  // Records that an allreduce has ended. `everyone`: true if all ranks reduced together, not in groups.
  void Reduced(const std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response, Time begin,
               bool everyone);

 private:
  hvd::Controller& controller_;
  const std::int32_t process_set_id_;
  const std::shared_ptr<recording::Recorder> recorder_;
  std::int64_t sequence_ = 0;  // the number of the next allreduce, which is the same on all ranks
  std::size_t known_ = 1;      // how many tensors of Horovod's table were counted; one is ours, to notice a shutdown
};

}  // namespace horovod_partial::attach
