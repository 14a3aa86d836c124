// The one attachment of this process to the Horovods in it: from a framework's library to its sessions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attach/session.h"
#include "core/activity.h"

namespace horovod_partial::attach {

// Replaces the virtual functions that the hooks need, of the transports that this build knows; again for the same
// library it does nothing. Throws AttachError if the library is not what this build was made for; then nothing has
// been changed. `waits_are_told`: the front end makes a ForeignWait of each wait for a collective of Horovod's own.
void Attach(const std::string& library_path, bool waits_are_told);

// The session of a process set, for an attached library. The first call after Horovod's initialisation shakes hands:
// a small allreduce over all ranks, after which every hook must have run on each of them. Throws AttachError, or
// EngineError if Horovod is not initialised.
std::shared_ptr<Session> SessionOf(const std::string& library_path, std::int32_t process_set_id);

// Every rank's text, by rank. Blocks until all ranks are here, in the same order as to Horovod's own collectives.
std::vector<std::string> Gather(const std::string& library_path, const std::string& text);

// As SessionOf, for reading what there is: null where Horovod is down, or no handshake has taken place. Never waits.
std::shared_ptr<Session> FindSession(const std::string& library_path, std::int32_t process_set_id);

// Tells initialisations of Horovod apart, whoever asked for them: another positive number after each, without a
// handshake; 0 while Horovod is down.
int Generation(const std::string& library_path);

// Bucket::taken; 0 if there is no such bucket.
Round Taken(const std::string& library_path, std::int32_t process_set_id, const std::string& bucket);
// Bucket::lost, of the one of these buckets that has lost most.
Round Lost(const std::string& library_path, std::int32_t process_set_id, const Family& buckets);
// Bucket::CatchUp; 0 without the bucket.
int CatchUp(const std::string& library_path, std::int32_t process_set_id, const std::string& bucket, int iteration);

// Session::device; the host without a session.
int DeviceOfBuckets(const std::string& library_path, std::int32_t process_set_id);

// Records what this rank sees from now on, until EndRecording or the next generation. Throws std::runtime_error where
// it cannot, or does so already.
void Record(const std::string& library_path, const std::string& directory, std::size_t most_bytes);
// The application was blocked for an operation of Horovod's own. Nothing where nothing is recorded, as below.
void RecordWait(const std::string& library_path, Time begin, Time end);
void EndRecording(const std::string& library_path);

// The calling thread waits for a collective of Horovod's own from here on, or has asked whether one is over.
std::unique_ptr<Bringers::ForeignWait> BeginForeignWait();
void Polled(bool over);

// What this process does, as far as other ranks may wait for it. Any thread; waits for nothing.
Look LookAtThisRank();

// For sessions that begin from now on.
void SetThresholds(const Engine::Thresholds& thresholds);

// What Collectives::Interrupt does; to be set once, before anything waits.
void SetInterrupt(std::function<void()> interrupt);

}  // namespace horovod_partial::attach
