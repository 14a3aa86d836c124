// The device that a bucket lies on, by Horovod's number for it. The only place that asks whether this build has any.
#pragma once

#include <cstdint>
#include <memory>

#include "core/memory.h"
#include "engine/ready_event.h"

namespace horovod_partial::attach {

// Throws std::invalid_argument for a device where Horovod was built without it.
Memory& MemoryOf(int device);

// Where a rank works that has not shown it yet: Horovod's examples give each local rank a device of its own.
int DefaultDevice(int local_rank);

// Stands behind what a framework has queued on a stream of the device; null for the host.
std::shared_ptr<ReadyEvent> RecordReadyEvent(int device, std::uintptr_t stream);

}  // namespace horovod_partial::attach
