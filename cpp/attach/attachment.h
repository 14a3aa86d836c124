// The functions for the extension modules: they attach this process to its Horovod libraries, and find the sessions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attach/session.h"
#include "core/watch/activity.h"

namespace horovod_partial::attach {

// Attaches to a library of Horovod: installs the hooks in it. A second call for the same library does nothing.
// `waits_are_told` says that the front end makes a ForeignWait for each wait for a collective of Horovod's own.
void Attach(const std::string& library_path, bool waits_are_told);

// Returns the session of a process set. The first call after Horovod's initialisation shakes hands by a small allreduce
// over all ranks. By its end every hook must have run on every rank. Throws AttachError if this fails, EngineError if
// Horovod is not initialised, or std::invalid_argument if this rank is not in the process set.
std::shared_ptr<Session> SessionOf(const std::string& library_path, std::int32_t process_set_id);

// Returns the texts of all ranks, by rank. Blocks until all ranks have called it. All ranks must call it in the same
// order relative to Horovod's own collectives.
std::vector<std::string> Gather(const std::string& library_path, const std::string& text);

// Returns the session of a process set if it exists, and never waits for other ranks. Null if Horovod is down, if no
// handshake has taken place in this generation, or if this rank is not in the process set.
std::shared_ptr<Session> FindSession(const std::string& library_path, std::int32_t process_set_id);

// Returns the number of the present generation, or 0 while Horovod is down. The number is positive, differs after each
// initialisation, and is known before the handshake. It does not matter which code initialised Horovod.
int Generation(const std::string& library_path);

// Returns the recorder of the last generation that has shaken hands, even if it is over; null if none has.
std::shared_ptr<recording::Recorder> LastRecorder(const std::string& library_path);

// Returns what this process does: it computes, waits for other ranks, or rests (has joined or ended). Any thread may
// call this function, which never waits for another rank.
Look LookAtThisRank();

}  // namespace horovod_partial::attach
