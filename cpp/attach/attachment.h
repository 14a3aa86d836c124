// Functions for the extension modules: they find sessions, and tell what this process does.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attach/attached.h"
#include "attach/session.h"
#include "core/watch/activity.h"

namespace horovod_partial::attach {

// Returns this rank's state for a process set. The first call after hvd.init() makes a small allreduce over all ranks,
// the handshake, which checks that our hooks run and that all ranks have the same version. Throws AttachError if this
// fails, EngineError if Horovod is not initialised, or std::invalid_argument if this rank is not in the process set.
std::shared_ptr<Session> SessionOf(Attached& library, std::int32_t process_set_id);

// Gathers a text from each rank, and returns all texts in the order of the ranks. Blocks until all ranks have called
// this function. All ranks must call it in the same order relative to Horovod's own collectives.
std::vector<std::string> Gather(Attached& library, const std::string& text);

// Returns the session of a process set, without waiting for other ranks. Returns null if Horovod is down, if there has
// been no handshake since the last hvd.init(), or if this rank is not in the process set.
std::shared_ptr<Session> FindSession(const Attached& library, std::int32_t process_set_id);

// Same as FindSession. Any thread may call this at any time, because it does not use Horovod's table of process sets.
// Horovod locks this table while it waits for other ranks, and removes process sets from it.
std::shared_ptr<Session> ReadySession(const Attached& library, std::int32_t process_set_id);

// Returns a positive number that differs after each hvd.init(), or 0 while Horovod is down. The number is known before
// the handshake. It does not matter which code initialised Horovod.
int Generation(const Attached& library);

// Returns what this process does: it computes, waits for other ranks, or rests (has joined or ended). Any thread may
// call this function, which never waits for another rank.
Look LookAtThisRank();
// Returns the steps of this rank that have ended since the last call. Returns nothing while steps are not watched.
std::optional<StepReport> TakeStepsOfThisRank();

}  // namespace horovod_partial::attach
