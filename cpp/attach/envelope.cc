#include "attach/envelope.h"

#include <algorithm>

#include "core/values/bytes.h"

namespace horovod_partial::attach {
namespace {

const std::string kPrefix = "horovod_partial/";
// The name of a request that holds a report begins with kReport. A bucket's name in messages begins with kPrefix.
const std::string kReport = "horovod_partial\n";
const std::string kAgreement = "allreduce.horovod_partial.agreement.";  // Horovod names PyTorch's allreduces like this
// The name of the response that says which micro-batches ranks may begin. No bucket has this name.
constexpr const char* kGrants = "horovod_partial.grants";

bool StartsWith(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

}  // namespace

std::string WireName(const std::string& bucket) { return kPrefix + bucket; }

bool IsOurs(const std::string& wire_name) { return StartsWith(wire_name, kPrefix); }

bool IsOurs(const hvd::Response& response) {
  return !response.tensor_names().empty() && IsOurs(response.tensor_names()[0]);
}

bool HasOurs(const hvd::ResponseList& responses) {
  return std::any_of(responses.responses().begin(), responses.responses().end(),
                     [](const hvd::Response& response) { return IsOurs(response); });
}

std::string AgreementName(const std::string& about) { return kAgreement + about; }

bool IsAgreement(const std::string& name) { return StartsWith(name, kAgreement); }

std::string BucketName(const std::string& wire_name) { return wire_name.substr(kPrefix.size()); }

// Horovod's own reduce operations have the values 0 to 5. The enumeration can hold values up to 7, so 7 is free.
hvd::ReduceOp TravellingSum() { return static_cast<hvd::ReduceOp>(7); }

hvd::Request Enclose(const Report& report, Rank rank) {
  hvd::Request request;
  request.set_request_rank(rank);
  request.set_request_type(hvd::Request::ALLREDUCE);
  request.set_tensor_type(hvd::DataType::HOROVOD_UINT8);
  request.set_reduce_op(TravellingSum());
  request.set_tensor_name(kReport + BytesOf(report));
  return request;
}

std::optional<Report> Open(const hvd::Request& request) {
  if (!StartsWith(request.tensor_name(), kReport)) return std::nullopt;
  return FromBytes<Report>(request.tensor_name().substr(kReport.size()), "a report");
}

void Enclose(const std::vector<Closing>& closings, hvd::Response& response) {
  std::vector<std::int32_t> words = response.devices();
  for (const auto& closing : closings) Append(closing, words);
  response.set_devices(words);
}

std::vector<Closing> Open(const hvd::Response& response, int size) {
  std::vector<Closing> closings;
  std::size_t at = static_cast<std::size_t>(size);
  for (const auto& name : response.tensor_names()) {
    Closing closing = DecodeClosing(response.devices(), at);
    closing.bucket = BucketName(name);
    closings.push_back(std::move(closing));
  }
  return closings;
}

hvd::Response Enclosed(const std::vector<Grants>& grants) {
  hvd::Response response;
  response.set_response_type(hvd::Response::ERROR);
  response.set_tensor_names({WireName(kGrants)});
  response.set_error_message(BytesOf(grants));
  return response;
}

std::vector<Grants> TakeGrants(hvd::ResponseList& responses) {
  const auto& last = responses.responses().back();
  if (last.tensor_names().empty() || last.tensor_names()[0] != WireName(kGrants)) return {};
  auto grants = FromBytes<std::vector<Grants>>(last.error_message(), "grants");
  std::vector<hvd::Response> others = responses.responses();
  others.pop_back();
  responses.set_responses(others);
  return grants;
}

void Unwrap(hvd::ResponseList& responses, int size) {
  std::vector<hvd::Response> list = responses.responses();
  for (auto& response : list) {
    if (!IsOurs(response) || response.response_type() == hvd::Response::ERROR) continue;
    response.set_reduce_op(hvd::ReduceOp::SUM);
    std::vector<std::int32_t> devices = response.devices();
    devices.resize(static_cast<std::size_t>(size));
    devices.push_back(CPU_DEVICE_ID);
    response.set_devices(devices);
  }
  responses.set_responses(list);
}

}  // namespace horovod_partial::attach
