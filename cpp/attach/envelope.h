// How our messages travel inside Horovod's requests and responses.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "attach/horovod.h"
#include "core/message.h"

namespace horovod_partial::attach {

// Our tensors' names on the wire and in Horovod's timeline: a prefix, then the bucket's name.
std::string WireName(const std::string& bucket);
bool IsOurs(const std::string& wire_name);
bool IsOurs(const hvd::Response& response);  // Horovod fuses ours with ours only
std::string BucketName(const std::string& wire_name);

// Names of Horovod's own allreduces in which the ranks agree on something that is no part of the training.
std::string AgreementName(const std::string& about);
bool IsAgreement(const std::string& name);

// While it travels, our reduction has a reduce_op that no other has, so Horovod fuses ours with ours only.
hvd::ReduceOp TravellingSum();

// A report rides along as one more request, which is never counted.
hvd::Request Enclose(const Report& report, Rank rank);
bool IsReport(const hvd::Request& request);
std::optional<Report> Open(const hvd::Request& request);

// Closings lie behind a response's devices, in the order of its tensors. Their presence makes the devices more than
// the ranks, and Horovod caches a response only if there are as many: a cached tensor could never be partial.
void Enclose(const std::vector<Closing>& closings, hvd::Response& response);
std::vector<Closing> Open(const hvd::Response& response, int size);

}  // namespace horovod_partial::attach
