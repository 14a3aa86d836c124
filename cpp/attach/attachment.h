// Attaches this process to the Horovod libraries in it, and finds the sessions of a library.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attach/session.h"
#include "core/watch/activity.h"

namespace horovod_partial::attach {

// Puts the hooks in place of virtual functions of the library's controllers and allreduces, for the transports (MPI,
// Gloo, NCCL) of this build. A second call for the same library does nothing. Throws AttachError if this build was made
// for another Horovod; then no function has been replaced. `waits_are_told`: the front end makes a ForeignWait for each
// wait for a collective of Horovod's own.
void Attach(const std::string& library_path, bool waits_are_told);

// Returns the session of a process set. The first call after Horovod's initialisation shakes hands by a small allreduce
// over all ranks, after which every hook must have run on each of them. Throws AttachError, EngineError if Horovod is
// not initialised, or std::invalid_argument if this rank is not in such a process set.
std::shared_ptr<Session> SessionOf(const std::string& library_path, std::int32_t process_set_id);

// Returns the texts of all ranks, by rank. Blocks until all ranks have called it. All ranks must call it in the same
// order relative to Horovod's own collectives.
std::vector<std::string> Gather(const std::string& library_path, const std::string& text);

// Returns the session if it exists, and never waits for other ranks. Null if Horovod is down, if no handshake has taken
// place in this generation, or if this rank is not in such a process set.
std::shared_ptr<Session> FindSession(const std::string& library_path, std::int32_t process_set_id);

// Returns the number of the present generation, whoever initialised Horovod: positive, another one after each
// initialisation, and known before the handshake. 0 while Horovod is down.
int Generation(const std::string& library_path);

// Begins to record what this rank sees, in `most_bytes` at most, until EndRecording or the next generation. Throws
// std::runtime_error if it cannot write there, or if this rank is recorded already.
void Record(const std::string& library_path, const std::string& directory, std::size_t most_bytes);
// Records that the application was blocked for an operation of Horovod's own. This and EndRecording do nothing if
// nothing is recorded.
void RecordWait(const std::string& library_path, Time begin, Time end);
void EndRecording(const std::string& library_path);

// Returns what this process does: it computes, waits for other ranks, or rests. Any thread may call this. It never
// waits for another rank.
Look LookAtThisRank();

// Sets the thresholds of all sessions that begin from now on.
void SetThresholds(const Engine::Thresholds& thresholds);

}  // namespace horovod_partial::attach
