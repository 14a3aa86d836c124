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
bool IsOurs(const hvd::Response& response);  // checks the first tensor: Horovod fuses buckets only with buckets
bool HasOurs(const hvd::ResponseList& responses);
std::string BucketName(const std::string& wire_name);

// Returns the name of an ordinary allreduce that is no part of the training, for example the one of the handshake.
std::string AgreementName(const std::string& about);
bool IsAgreement(const std::string& name);

// Returns the reduce_op of a bucket's reduction in messages between ranks. No reduction of Horovod's own has this
// value, so Horovod fuses buckets only with buckets.
hvd::ReduceOp TravellingSum();

// A report travels in an additional request, which the coordinator takes out before Horovod counts the requests.
hvd::Request Enclose(const Report& report, Rank rank);
std::optional<Report> Open(const hvd::Request& request);

// Appends closings (which rounds close) to a response's list of devices, in the order of the response's tensors.
// Horovod caches a response only if the list has one device for each rank. So this response, with a longer list, is not
// cached. That is needed, because a cached round would wait for all ranks.
void Enclose(const std::vector<Closing>& closings, hvd::Response& response);
std::vector<Closing> Open(const hvd::Response& response, int size);

// The coordinator's decisions about micro-batches travel in an additional response, the last one. TakeGrants takes this
// response out, because Horovod must not execute it.
hvd::Response Enclosed(const std::vector<Grants>& grants);
std::vector<Grants> TakeGrants(hvd::ResponseList& responses);

// Turns the responses of buckets into ordinary sums, so that Horovod can execute them. The list of devices keeps one
// element more than there are ranks, so that Horovod does not cache the responses. Each time the list of a bucket is
// the same, because Horovod finds NCCL's communicator by it.
void Unwrap(hvd::ResponseList& responses, int size);

}  // namespace horovod_partial::attach
