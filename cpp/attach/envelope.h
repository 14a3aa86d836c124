// How our messages travel inside Horovod's requests and responses.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attach/horovod.h"
#include "core/rounds/message.h"

namespace horovod_partial::attach {

// A bucket's name on the wire and in Horovod's timeline: a prefix, then the name of the bucket.
std::string WireName(const std::string& bucket);
bool IsOurs(const std::string& wire_name);
bool IsOurs(const hvd::Response& response);  // looks at the first tensor: Horovod fuses ours only with each other
bool HasOurs(const hvd::ResponseList& responses);
std::string BucketName(const std::string& wire_name);

// Names of ordinary Horovod allreduces by which the ranks agree on something outside the training, such as the
// handshake.
std::string AgreementName(const std::string& about);
bool IsAgreement(const std::string& name);

// The reduce_op of our reductions while they travel. No reduction of Horovod's own has it, so Horovod fuses ours only
// with each other.
hvd::ReduceOp TravellingSum();

// A report travels in an additional request. The coordinator takes that out before Horovod counts the requests.
hvd::Request Enclose(const Report& report, Rank rank);
bool IsReport(const hvd::Request& request);
std::optional<Report> Open(const hvd::Request& request);

// Closings are appended to a response's devices, in the order of its tensors. Horovod caches a response only if it has
// one device for each rank. So it never caches ours: a cached tensor could not be partial.
void Enclose(const std::vector<Closing>& closings, hvd::Response& response);
std::vector<Closing> Open(const hvd::Response& response, int size);

// Grants travel in a response of their own, the last one. TakeGrants takes it out, because Horovod must not execute it.
hvd::Response Enclosed(const std::vector<Grants>& grants);
std::vector<Grants> TakeGrants(hvd::ResponseList& responses);

// Makes ordinary sums of our responses, which Horovod then executes. The list of devices keeps one element more than
// there are ranks. So Horovod does not cache the response, and finds NCCL's communicator again, which it keeps by the
// list of devices.
void Unwrap(hvd::ResponseList& responses, int size);

}  // namespace horovod_partial::attach
