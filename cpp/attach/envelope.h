// How our messages travel inside Horovod's requests and responses.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attach/horovod.h"
#include "core/rounds/message.h"

namespace horovod_partial::attach {

// Returns the name that a bucket has in Horovod's messages and timeline: a prefix, then the name of the bucket.
std::string WireName(const std::string& bucket);
bool IsOurs(const std::string& wire_name);
bool IsOurs(const hvd::Response& response);  // looks at one tensor: Horovod fuses our tensors only with each other
bool HasOurs(const hvd::ResponseList& responses);
std::string BucketName(const std::string& wire_name);

// Names of ordinary allreduces by which the ranks agree on something outside the training, such as the handshake.
std::string AgreementName(const std::string& about);
bool IsAgreement(const std::string& name);

// The reduce_op of our reductions in messages between ranks. No reduction of Horovod's own has it, so Horovod fuses our
// tensors only with each other.
hvd::ReduceOp TravellingSum();

// A report travels in an additional request, which the coordinator takes out before Horovod counts the requests.
hvd::Request Enclose(const Report& report, Rank rank);
bool IsReport(const hvd::Request& request);
std::optional<Report> Open(const hvd::Request& request);

// Closings are appended to the list of devices of a response, in the order of its tensors. Horovod caches a response
// only if the list has one device for each rank, so it never caches ours. A cached round would wait for all ranks.
void Enclose(const std::vector<Closing>& closings, hvd::Response& response);
std::vector<Closing> Open(const hvd::Response& response, int size);

// The coordinator's decisions about micro-batches travel in an additional response, the last one. TakeGrants takes this
// response out, because Horovod must not execute it.
hvd::Response Enclosed(const std::vector<Grants>& grants);
std::vector<Grants> TakeGrants(hvd::ResponseList& responses);

// Turns our responses into ordinary sums, which Horovod then executes. The list of devices keeps one element more than
// there are ranks, so Horovod does not cache the response. Horovod also looks up NCCL's communicator by this list.
void Unwrap(hvd::ResponseList& responses, int size);

}  // namespace horovod_partial::attach
