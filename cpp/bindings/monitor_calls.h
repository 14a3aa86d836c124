// The functions that the heartbeat monitor's thread calls in a Python process.
#pragma once

#include <sys/types.h>

#include <map>

#include "core/values/types.h"
#include "heartbeat/monitor.h"

namespace horovod_partial {

// `neighbours` has the process ids of other ranks on this host, by rank.
heartbeat::Calls MonitorCalls(Rank rank, const heartbeat::Limits& limits, const std::map<Rank, pid_t>& neighbours);

}  // namespace horovod_partial
