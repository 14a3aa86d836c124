#include "tf/destination.h"

#include <charconv>
#include <stdexcept>
#include <utility>
#include <vector>

#include "attach/attachment.h"
#include "tf/library.h"
#include "tf/step_waits.h"

namespace horovod_partial::tf {
namespace {

StepWaits& Waits() {
  static auto* waits = new StepWaits;  // the background thread may outlive static objects
  return *waits;
}

DataType CoreType(tensorflow::DataType type) {
  switch (type) {
    case tensorflow::DT_INT32: return DataType::kInt32;
    case tensorflow::DT_INT64: return DataType::kInt64;
    case tensorflow::DT_HALF: return DataType::kFloat16;
    case tensorflow::DT_FLOAT: return DataType::kFloat32;
    case tensorflow::DT_DOUBLE: return DataType::kFloat64;
    default: throw std::invalid_argument("tensors of type " + tensorflow::DataTypeString(type) + " are not reduced");
  }
}

absl::Status AsStatus(const std::function<absl::Status()>& body) {
  try {
    return body();
  } catch (const TransportError& error) {
    return absl::UnknownError(error.what());
  } catch (const std::invalid_argument& error) {
    return absl::InvalidArgumentError(error.what());
  } catch (const std::exception& error) {
    return absl::FailedPreconditionError(error.what());
  }
}

}  // namespace

Destination::Destination(tensorflow::OpKernelConstruction* context) {
  const auto get = [&](const char* name, auto* value) { OP_REQUIRES_OK(context, context->GetAttr(name, value)); };
  const auto get_real = [&](const char* name, double* value) {
    std::string text;
    get(name, &text);
    std::from_chars(text.data(), text.data() + text.size(), *value);  // whatever the program's locale
  };
  std::string rule, schedule, description;
  int quorum = 0, group_size = 0, window = 0;
  std::int64_t seed = 0, max_staleness = 0, period = 0;
  double grace_seconds = 0;
  std::vector<int> table;
  get("T", &type_);
  get("process_set", &process_set_);
  get("size", &size_);
  get("rule", &rule);
  get("quorum", &quorum);
  get("seed", &seed);
  get("max_staleness", &max_staleness);
  get_real("grace_seconds", &grace_seconds);
  get("schedule", &schedule);
  get("group_size", &group_size);
  get("table", &table);
  get("period", &period);
  get("window", &window);
  get("description", &description);
  get("missed", &arguments_.missed);
  get("late", &arguments_.late);
  get("divide_by_contributors", &arguments_.divide_by_contributors);
  get("drop_nonfinite", &arguments_.drop_nonfinite);
  get("drop_nonfinite_results", &arguments_.drop_nonfinite_results);
  get("weights", &arguments_.weights);
  get_real("weight_parameter", &arguments_.weight_parameter);
  get_real("prescale_factor", &arguments_.prescale_factor);
  get_real("postscale_factor", &arguments_.postscale_factor);
  if (!context->status().ok()) return;
  std::vector<Partition> rounds;  // flat in the attribute, a row for each round
  for (std::size_t i = 0; i < table.size(); ++i) {
    if (i % static_cast<std::size_t>(size_) == 0) rounds.emplace_back();
    rounds.back().push_back(table[i]);
  }
  try {
    policy_ = MakePolicy(rule, quorum, static_cast<std::uint64_t>(seed), max_staleness, grace_seconds, schedule,
                         group_size, rounds, period, window, description);
  } catch (const std::exception& error) {
    context->SetStatus(absl::InvalidArgumentError(error.what()));
  }
}

absl::Status Destination::GetSession(const std::string& name, std::shared_ptr<attach::Session>* session) const {
  return AsStatus([&]() -> absl::Status {
    *session = attach::SessionOf(LibraryPath(), process_set_);
    const int size = (*session)->engine().size();
    if (size == size_) return absl::OkStatus();
    return absl::FailedPreconditionError("bucket " + name + " was made for " + std::to_string(size_) +
                                         " ranks, and now there are " + std::to_string(size) +
                                         "; make the optimizer anew, and trace tf.functions again");
  });
}

absl::Status Destination::Arrive(const std::shared_ptr<attach::Session>& session, const std::string& bucket,
                                 const Step& step, const std::shared_ptr<const Message>& message, int work,
                                 std::function<void(const Work&)> on_done) const {
  return AsStatus([&]() -> absl::Status {
    Policy policy = policy_;
    policy.description = message->Describe(policy_.description);
    const auto handle =
        session->engine().Declare(bucket, MakeConfig(CoreType(type_), message->shape(), -1, policy, arguments_));
    const auto arrived =
        session->engine().Arrive(handle, {message->source(), message->target(), 1, work}, nullptr, std::move(on_done));
    // The kernel may be done by now, and gone.
    Waits().Add(step.name, step.run, step.buckets, {session, handle, arrived});
    return absl::OkStatus();
  });
}

}  // namespace horovod_partial::tf
