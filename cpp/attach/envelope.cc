#include "attach/envelope.h"

namespace horovod_partial::attach {
namespace {

const std::string kPrefix = "horovod_partial/";
// No tensor of ours has such a name: its prefix ends with a slash.
const std::string kReport = "horovod_partial\n";
const std::string kAgreement = "horovod_partial.agreement.";

bool StartsWith(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

}  // namespace

std::string WireName(const std::string& bucket) { return kPrefix + bucket; }

bool IsOurs(const std::string& wire_name) { return StartsWith(wire_name, kPrefix); }

bool IsOurs(const hvd::Response& response) {
  return !response.tensor_names().empty() && IsOurs(response.tensor_names()[0]);
}

std::string AgreementName(const std::string& about) { return kAgreement + about; }

bool IsAgreement(const std::string& name) { return StartsWith(name, kAgreement); }

std::string BucketName(const std::string& wire_name) { return wire_name.substr(kPrefix.size()); }

// Horovod's own values end at 5, and the enumeration can hold up to 7.
hvd::ReduceOp TravellingSum() { return static_cast<hvd::ReduceOp>(7); }

hvd::Request Enclose(const Report& report, Rank rank) {
  hvd::Request request;
  request.set_request_rank(rank);
  request.set_request_type(hvd::Request::ALLREDUCE);
  request.set_tensor_type(hvd::DataType::HOROVOD_UINT8);
  request.set_reduce_op(TravellingSum());
  request.set_tensor_name(kReport + Encode(report));
  return request;
}

bool IsReport(const hvd::Request& request) { return StartsWith(request.tensor_name(), kReport); }

std::optional<Report> Open(const hvd::Request& request) {
  if (!IsReport(request)) return std::nullopt;
  return DecodeReport(request.tensor_name().substr(kReport.size()));
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

}  // namespace horovod_partial::attach
