#include "attach/session.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "attach/device.h"
#include "attach/envelope.h"
#include "attach/tensors.h"
#include "engine/log.h"

namespace horovod_partial::attach {
namespace {

// Status bits of Horovod's cache coordinator, stored inverted: a cleared bit says yes, and one rank's yes is enough.
constexpr long long kShouldShutDown = 1LL << 0;
constexpr long long kUncachedInQueue = 1LL << 1;

constexpr int kStandInMilliseconds = 20'000;  // less than Gloo's patience with a rank
constexpr Time kWarnAfter = std::chrono::seconds(60);

static_assert(static_cast<int>(DataType::kUInt8) == hvd::HOROVOD_UINT8 &&
                  static_cast<int>(DataType::kInt8) == hvd::HOROVOD_INT8 &&
                  static_cast<int>(DataType::kUInt16) == hvd::HOROVOD_UINT16 &&
                  static_cast<int>(DataType::kInt16) == hvd::HOROVOD_INT16 &&
                  static_cast<int>(DataType::kInt32) == hvd::HOROVOD_INT32 &&
                  static_cast<int>(DataType::kInt64) == hvd::HOROVOD_INT64 &&
                  static_cast<int>(DataType::kFloat16) == hvd::HOROVOD_FLOAT16 &&
                  static_cast<int>(DataType::kFloat32) == hvd::HOROVOD_FLOAT32 &&
                  static_cast<int>(DataType::kFloat64) == hvd::HOROVOD_FLOAT64 &&
                  static_cast<int>(DataType::kBool) == hvd::HOROVOD_BOOL,
              "the core's data types are Horovod's");

std::function<void()>& InterruptFunction() {
  static auto* function = new std::function<void()>;  // waits may outlive static objects
  return *function;
}

const std::shared_ptr<WaitClock>& ProcessClock() {
  static const auto* clock = new std::shared_ptr<WaitClock>(std::make_shared<WaitClock>());
  return *clock;
}

bool HasOurs(const hvd::ResponseList& responses) {
  return std::any_of(responses.responses().begin(), responses.responses().end(),
                     [](const hvd::Response& response) { return IsOurs(response); });
}

hvd::DataType HorovodType(DataType type) { return static_cast<hvd::DataType>(type); }

}  // namespace

Session::Session(hvd::Controller& controller, const Options& options)
    : controller_(controller),
      alive_(controller.weak_from_this()),
      rank_(controller.GetRank()),
      size_(controller.GetSize()),
      joined_(static_cast<std::size_t>(size_), false),
      coordinator_(controller.IsCoordinator() ? std::make_unique<Coordinator>(size_) : nullptr),
      decision_log_path_(options.decision_log),
      engine_(*this, rank_, size_, options.thresholds, ProcessClock()) {}

void Session::Retire() {
  retired_ = true;
  engine_.Close("Horovod has been initialised anew; what was pending is gone");
}

void Session::SetState(hvd::HorovodGlobalState& state, std::int32_t process_set_id) {
  process_set_id_ = process_set_id;
  process_set_ = &state.process_set_table.Get(process_set_id);
  communicators_ = std::make_unique<GroupCommunicators>(state, *process_set_, rank_, size_);
  if (coordinator_ != nullptr && process_set_id == 0 && !decision_log_path_.empty()) {
    decision_file_.open(decision_log_path_);
    if (!decision_file_) Log(LogLevel::kWarning, rank_, "cannot write the decision log " + decision_log_path_);
    decision_log_ = std::make_unique<DecisionLog>(decision_file_, size_);
  }
  state_ = &state;
  WatchForShutdown();
}

// Horovod calls every entry back when it shuts down: this one is never reduced, and there for that. Buckets cannot be
// closed in the callback, which comes with the queue's lock held, so a thread of its own does it.
void Session::WatchForShutdown() {
  hvd::TensorTableEntry entry;
  entry.tensor_name = WireName("");
  entry.context = std::make_shared<BucketContext>(Memory::Host());
  entry.tensor = entry.output =
      std::make_shared<TensorView>(nullptr, hvd::HOROVOD_UINT8, std::vector<std::int64_t>{0}, 0);
  entry.process_set_id = process_set_id_;
  entry.callback = [session = weak_from_this()](const hvd::Status&) {
    if (const auto self = session.lock())
      std::thread([self] { self->engine_.Close(hvd::SHUT_DOWN_ERROR.reason()); }).detach();
  };
  auto& queue = QueueAccess::Of(controller_);
  std::lock_guard<std::mutex> lock(queue.mutex_);
  queue.tensor_table_.emplace(entry.tensor_name, std::move(entry));
}

std::string Session::MissingHooks() const {
  static const char* const names[] = {"DoInitialization", "CrossRankBitwiseAnd", "SendReadyTensors",
                                      "RecvReadyTensors", "SendFinalTensors",    "RecvFinalTensors"};
  const unsigned expected =
      coordinator_ != nullptr ? kRecvReadyTensors | kSendFinalTensors : kSendReadyTensors | kRecvFinalTensors;
  const unsigned missing = expected & ~hooks_run_;
  std::string text;
  for (unsigned i = 0; i < std::size(names); ++i)
    if ((missing >> i & 1u) != 0) text += (text.empty() ? "" : ", ") + std::string(names[i]);
  return text;
}

std::map<std::string, Coordinator::Offsets> Session::ArrivalOffsets() const {
  std::lock_guard<std::mutex> lock(coordinator_mutex_);
  return coordinator_ == nullptr ? std::map<std::string, Coordinator::Offsets>() : coordinator_->ArrivalOffsets();
}

std::map<std::string, std::int64_t> Session::UnconnectedWindows() const {
  std::lock_guard<std::mutex> lock(coordinator_mutex_);
  return coordinator_ == nullptr ? std::map<std::string, std::int64_t>() : coordinator_->UnconnectedWindows();
}

// Horovod would catch what a hook throws, and go on with half a cycle done.
void Session::Guard(const char* hook, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    Log(LogLevel::kError, rank_,
        std::string("internal error in ") + hook + ": " + error.what() + "; all ranks shut down. Please report this.");
    failed_ = true;
  }
}

// --- Background thread

void Session::EndIfBroken() const {
  if (!broken_.empty()) throw std::runtime_error("a reduction failed: " + broken_);
}

Time Session::ForeignSince(Time now) {
  if (state_ == nullptr) return kNever;
  bool still_there = false;
  const hvd::TensorTable::value_type* other = nullptr;
  const auto watched = foreign_context_.lock();
  for (const std::int32_t id : state_.load()->process_set_table.Ids()) {
    auto& queue = QueueAccess::Of(*state_.load()->process_set_table.Get(id).controller);
    std::lock_guard<std::mutex> lock(queue.mutex_);
    for (const auto& row : queue.tensor_table_) {
      if (IsOurs(row.first)) continue;
      other = &row;
      still_there = still_there || (row.first == foreign_ && row.second.context == watched);
    }
    if (!still_there && other != nullptr) {
      foreign_ = other->first;
      foreign_context_ = other->second.context;
      foreign_since_ = now;
      return now;
    }
  }
  if (!still_there) {
    foreign_.clear();
    foreign_context_.reset();
    foreign_since_ = kNever;
  }
  return foreign_since_;
}

void Session::Tick(std::vector<long long>& status_bits) {
  hooks_run_ |= kCrossRankBitwiseAnd;
  if (state_ == nullptr) return;
  Guard("CrossRankBitwiseAnd", [&] {
    engine_.ArriveWhatIsReady();
    const Time now = Now();
    bool cycle = engine_.WantsCycle(now, ForeignSince(now));
    if (coordinator_ != nullptr) {
      cycle = cycle || coordinator_->NextDeadline() <= now;
      WarnAboutWaits(now);
    }
    if (cycle) status_bits[0] &= ~kUncachedInQueue;
  });
  if (failed_) status_bits[0] &= ~kShouldShutDown;
}

void Session::WarnAboutWaits(Time now) {
  if (now - last_warning_ < kWarnAfter / 10) return;
  last_warning_ = now;
  const std::string waits = coordinator_->DescribeWaits(now - kWarnAfter);
  if (waits == warned_) return;
  warned_ = waits;
  if (!waits.empty()) Log(LogLevel::kWarning, rank_, "waiting for a minute and longer: " + waits);
}

void Session::BeforeSendReady(hvd::RequestList& requests) {
  hooks_run_ |= kSendReadyTensors;
  if (state_ == nullptr) return;
  Guard("SendReadyTensors", [&] {
    engine_.ArriveWhatIsReady();  // with Horovod's response cache off there are no ticks
    std::vector<std::string> sent;
    for (const auto& request : requests.requests())
      if (IsOurs(request.tensor_name())) sent.push_back(BucketName(request.tensor_name()));
    const Time now = Now();
    const Report report = engine_.BuildReport(sent, now, ForeignSince(now));
    if (!report.empty()) requests.add_request(Enclose(report, rank_));
  });
  if (failed_) requests.set_shutdown(true);
}

void Session::AfterRecvReady(std::vector<hvd::RequestList>& ready) {
  hooks_run_ |= kRecvReadyTensors;
  if (state_ == nullptr) return;
  Guard("RecvReadyTensors", [&] {
    std::lock_guard<std::mutex> lock(coordinator_mutex_);
    const Time now = Now();
    engine_.ArriveWhatIsReady();  // here too, as there are no ticks with Horovod's response cache off
    WarnAboutWaits(now);
    // The other ranks' messages: ours are taken out, and go back in when their round closes.
    for (Rank rank = 1; rank < size_; ++rank) {
      auto& list = ready[static_cast<std::size_t>(rank)];
      Report report;
      bool ours = false;
      for (const auto& request : list.requests()) {
        if (auto opened = Open(request)) {
          report = std::move(*opened);
          ours = true;
        } else if (IsOurs(request.tensor_name())) {
          requests_[request.tensor_name()].arrived[rank] = request;
          requests_[request.tensor_name()].devices[rank] = request.device();
          ours = true;
        } else if (request.request_type() == hvd::Request::JOIN) {
          joined_[static_cast<std::size_t>(rank)] = true;
        }
      }
      if (ours) {
        std::vector<hvd::Request> kept;
        for (const auto& request : list.requests())
          if (!IsOurs(request.tensor_name()) && !IsReport(request)) kept.push_back(request);
        list.set_requests(kept);
      }
      Observe(rank, report, now);
    }
    // The coordinator's own requests are in its table already.
    joined_[0] = process_set_->joined;
    std::vector<std::string> sent;
    for (const auto& row : ControllerAccess::Of(controller_).message_table_) {
      if (!IsOurs(row.first)) continue;
      Requests& requests = requests_[row.first];
      requests.last = row.second.front();
      requests.devices[0] = requests.last.device();
      if (!std::exchange(requests.own_reported, true)) sent.push_back(BucketName(row.first));
    }
    Observe(0, engine_.BuildReport(sent, now, ForeignSince(now)), now);
    coordinator_->SetJoined(joined_);
    auto closings = coordinator_->Decide(now);
    if (decision_log_ != nullptr) {
      decision_log_->SetJoined(joined_);
      decision_log_->Decide(now, closings);
    }

    std::vector<Closing> begun;
    std::vector<hvd::Request> rows;
    for (auto& closing : closings) {
      const bool grouped = !closing.groups.empty() || !closing.upcoming.empty();
      const std::string refusal = grouped ? GroupCommunicators::Refusal(*state_) : "";
      if (closing.error.empty() && !refusal.empty())
        closing.error = "groups of ranks do not work with Horovod's operation " + refusal + ".";
      const bool begins = CloseRound(closing, rows);
      if (begins) begun.push_back(closing);
      const std::string name = WireName(closing.bucket);
      closed_[name] = {std::move(closing), begins};
    }
    if (!rows.empty() && size_ > 1) {
      // Before a JOIN that the same list may hold: Horovod calls a row ready when it has as many requests as there are
      // ranks that have not joined, neither more nor fewer.
      const auto& others = ready[1].requests();
      rows.insert(rows.end(), others.begin(), others.end());
      ready[1].set_requests(rows);
    }
    engine_.Begin(begun);
    if (joined_[0]) return;
    for (const auto& [name, closed] : closed_) {
      std::int64_t elements = 1;
      const hvd::Request& request = requests_[name].last;
      for (const std::int64_t dimension : request.tensor_shape()) elements *= dimension;
      PlaceZeros(name, request.tensor_type(), elements, request.device());
    }
  });
}

void Session::Observe(Rank rank, const Report& report, Time now) {
  coordinator_->Observe(rank, report, now);
  if (decision_log_ != nullptr) decision_log_->Observe(rank, report, now);
}

// Completes the row of this round, so that Horovod finds it ready. True if the round begins on this rank at once, and
// not when the responses are known: fusing looks the entries up before that, and they may not be there yet.
bool Session::CloseRound(const Closing& closing, std::vector<hvd::Request>& rows) {
  const std::string name = WireName(closing.bucket);
  Requests& requests = requests_[name];
  if (!requests.arrived.empty()) requests.last = requests.arrived.begin()->second;
  const bool own = requests.own_reported;

  for (Rank rank = own ? 1 : 0; rank < size_; ++rank) {
    const auto arrived = requests.arrived.find(rank);
    hvd::Request request = arrived != requests.arrived.end() ? arrived->second : requests.last;
    request.set_request_rank(rank);
    if (const auto device = requests.devices.find(rank); device != requests.devices.end())
      request.set_device(device->second);
    // Horovod's own check makes the error response; its text is replaced by ours.
    if (!closing.error.empty() && rank == size_ - 1)
      request.set_tensor_type(request.tensor_type() == hvd::HOROVOD_UINT8 ? hvd::HOROVOD_INT8 : hvd::HOROVOD_UINT8);
    rows.push_back(std::move(request));
  }
  requests.arrived.clear();
  requests.own_reported = false;

  // An own arrival waits until the responses are known: they may refuse it.
  if (own || joined_[0] || engine_.Find(closing.bucket) == nullptr) return false;
  if (closing.error.empty()) return true;
  engine_.Refuse(closing.bucket);
  return false;
}

namespace {

// Fusing saves a reduction's latency, and costs a copy into the fusion buffer and one out of it. For a tensor as large
// as this the copies cost more (4 ranks on one machine: from 256 KiB on over MPI, from 4 MiB on over Gloo).
constexpr std::int64_t kLargeBytes = 4 << 20;

// Ours, with large tensors taken out of fused responses: they are reduced where they lie. What stays together has the
// same groups.
template <class GroupsOfTensor>
std::vector<hvd::Response> Unfused(const std::vector<hvd::Response>& responses, const GroupsOfTensor& groups_of) {
  std::vector<hvd::Response> list;
  for (const auto& response : responses) {
    if (!IsOurs(response) || response.tensor_names().size() < 2) {
      list.push_back(response);
      continue;
    }
    const auto element_bytes = static_cast<std::int64_t>(SizeOf(static_cast<DataType>(response.tensor_type())));
    std::map<Partition, std::size_t> together;  // where in the list tensors with these groups are
    for (std::size_t i = 0; i < response.tensor_names().size(); ++i) {
      const std::string& name = response.tensor_names()[i];
      const std::int64_t elements = response.tensor_sizes()[i];
      const bool alone = elements * element_bytes >= kLargeBytes;
      const auto known = alone ? together.end() : together.find(groups_of(name));
      if (known != together.end()) {
        list[known->second].add_tensor_name(name);
        list[known->second].add_tensor_size(elements);
        continue;
      }
      if (!alone) together[groups_of(name)] = list.size();
      list.push_back(response);
      list.back().set_tensor_names({name});
      list.back().set_tensor_sizes({elements});
    }
  }
  return list;
}

}  // namespace

void Session::BeforeSendFinal(hvd::ResponseList& responses) {
  hooks_run_ |= kSendFinalTensors;
  if (state_ == nullptr) return;
  if (failed_) responses.set_shutdown(true);
  Guard("SendFinalTensors", [&] {
    std::lock_guard<std::mutex> lock(coordinator_mutex_);
    for (const auto& response : responses.responses())
      if (response.response_type() == hvd::Response::JOIN) joined_.assign(joined_.size(), false);
    if (!HasOurs(responses)) return;
    std::vector<hvd::Response> list =
        Unfused(responses.responses(), [&](const std::string& name) { return closed_.at(name).closing.groups; });
    for (auto& response : list) {
      if (!IsOurs(response)) continue;
      if (response.response_type() == hvd::Response::ERROR) {
        const std::string& name = response.tensor_names()[0];
        const std::string& error = closed_.at(name).closing.error;
        if (!error.empty()) response.set_error_message(error);
        coordinator_->Forget(BucketName(name));
        if (decision_log_ != nullptr) decision_log_->Forget(BucketName(name));
        continue;
      }
      std::vector<Closing> closings;
      for (const auto& name : response.tensor_names()) closings.push_back(closed_.at(name).closing);
      Enclose(closings, response);
    }
    responses.set_responses(list);
  });
}

namespace {

// What has travelled as ours is reduced as an ordinary sum. One device more than there are ranks stays: so Horovod does
// not cache the response, and NCCL finds its communicator again, which it keeps by the list of devices.
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

}  // namespace

void Session::AfterSendFinal(hvd::ResponseList& responses) {
  if (state_ == nullptr || !HasOurs(responses)) return;
  Guard("SendFinalTensors", [&] {
    std::vector<Closing> own;  // the others have begun already
    for (auto& closing : OpenAll(responses))
      if (!closed_.at(WireName(closing.bucket)).begun && engine_.Find(closing.bucket) != nullptr)
        own.push_back(std::move(closing));
    if (!process_set_->joined) engine_.Begin(own);
  });
  closed_.clear();
  Unwrap(responses, size_);
  FillMissing(responses);
}

void Session::AfterRecvFinal(hvd::ResponseList& responses) {
  hooks_run_ |= kRecvFinalTensors;
  if (state_ == nullptr || !HasOurs(responses)) return;
  Guard("RecvFinalTensors", [&] {
    std::vector<Closing> closings = OpenAll(responses);
    if (process_set_->joined) return;
    for (const auto& response : responses.responses()) {
      if (!IsOurs(response) || response.response_type() != hvd::Response::ERROR) continue;
      const std::string bucket = BucketName(response.tensor_names()[0]);
      if (engine_.Find(bucket) != nullptr) engine_.Refuse(bucket);
    }
    std::vector<Closing> begun;
    for (auto& closing : closings)
      if (engine_.Find(closing.bucket) != nullptr) begun.push_back(std::move(closing));
    engine_.Begin(begun);
  });
  Unwrap(responses, size_);
  FillMissing(responses);
}

// The closings of a cycle. Those with groups are noted, on joined ranks too, for when Horovod executes them.
std::vector<Closing> Session::OpenAll(const hvd::ResponseList& responses) {
  if (!grouped_.empty())
    throw std::runtime_error(
        grouped_.begin()->first +
        " has groups, and Horovod reduced it over all ranks, with an operation that horovod-partial "
        "does not know. Turn hierarchical and torus allreduce off");
  std::vector<Closing> closings;
  for (const auto& response : responses.responses()) {
    if (!IsOurs(response) || response.response_type() == hvd::Response::ERROR) continue;
    for (auto& closing : Open(response, size_)) {
      if (!closing.groups.empty() || !closing.upcoming.empty()) grouped_[WireName(closing.bucket)] = closing;
      closings.push_back(std::move(closing));
    }
  }
  return closings;
}

hvd::Status Session::Execute(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response,
                             Carrier carrier, const Reduce& reduce) {
  std::vector<Closing> closings;
  for (const auto& name : response.tensor_names())
    if (auto noted = grouped_.extract(name)) closings.push_back(std::move(noted.mapped()));
  if (closings.empty()) return reduce(response);

  const Partition groups = closings[0].groups;
  for (const Closing& closing : closings)
    if (closing.groups != groups || (!groups.empty() && closings.size() != response.tensor_names().size()))
      return hvd::Status::UnknownError("internal error: tensors of different groups were fused");
  const int made = communicators_->made();
  const auto setup = communicators_->setup();
  hvd::Status status = hvd::Status::OK();
  if (groups.empty()) {
    status = reduce(response);
  } else {
    communicators_->Use(groups, carrier);
    const Members members = GroupOf(groups, rank_, size_);
    if (members.size() > 1) {
      const GroupCommunicators::Scope scope(*communicators_, members, carrier);
      hvd::Response mine = response;  // NCCL's communicators are kept by the list of devices
      if (carrier == Carrier::kNccl) {
        std::vector<std::int32_t> devices = members;
        for (const Rank member : members) devices.push_back(response.devices()[static_cast<std::size_t>(member)]);
        mine.set_devices(devices);
      }
      status = reduce(mine);
    } else if (!members.empty()) {
      for (const auto& entry : entries)
        if (entry.tensor->data() != entry.output->data())
          MemoryOf(entry.device)
              .Copy(const_cast<void*>(entry.output->data()), entry.tensor->data(),
                    static_cast<std::size_t>(entry.tensor->size()));
    }
  }
  for (const Closing& closing : closings)
    for (const Partition& partition : closing.upcoming) communicators_->Use(partition, carrier);
  if (communicators_->made() > made) {
    if (const auto bucket = engine_.Find(closings[0].bucket)) {
      std::lock_guard<std::mutex> lock(bucket->mutex);
      bucket->statistics.groups_made += communicators_->made() - made;
      bucket->statistics.setup_seconds += std::chrono::duration<double>(communicators_->setup() - setup).count();
    }
  }
  return status;
}

// Horovod takes for granted that each tensor of a response has an entry. Where the engine has made none (the bucket was
// first used while this rank had joined, or it has failed here) this rank takes part with zeros.
void Session::FillMissing(const hvd::ResponseList& responses) {
  if (process_set_->joined) return;
  for (const auto& response : responses.responses()) {
    if (!IsOurs(response)) continue;
    const bool error = response.response_type() == hvd::Response::ERROR;
    for (std::size_t i = 0; i < response.tensor_names().size(); ++i)
      PlaceZeros(response.tensor_names()[i], error ? hvd::HOROVOD_UINT8 : response.tensor_type(),
                 error ? 0 : response.tensor_sizes()[i],
                 error ? CPU_DEVICE_ID : response.devices()[static_cast<std::size_t>(rank_)]);
  }
}

void Session::PlaceZeros(const std::string& wire_name, hvd::DataType type, std::int64_t elements, int device) {
  auto& queue = QueueAccess::Of(controller_);
  {
    std::lock_guard<std::mutex> lock(queue.mutex_);
    if (queue.tensor_table_.count(wire_name) > 0) return;
  }
  // A bucket that has failed here lies where it did; of one that this rank never used the response only has a guess.
  if (const auto bucket = engine_.Find(BucketName(wire_name))) device = bucket->core.memory().device();
  const auto bytes = static_cast<std::size_t>(elements) * SizeOf(static_cast<DataType>(type));
  auto zeros = std::make_shared<Buffer>();
  zeros->Reserve(bytes, MemoryOf(device));
  if (bytes > 0) zeros->Zero();
  hvd::TensorTableEntry entry;
  entry.tensor_name = wire_name;
  entry.context = std::make_shared<BucketContext>(MemoryOf(device));
  entry.device = device;
  entry.tensor = entry.output = std::make_shared<TensorView>(zeros->data(), type, std::vector<std::int64_t>{elements},
                                                             static_cast<std::int64_t>(bytes));
  entry.process_set_id = process_set_id_;
  entry.callback = [zeros](const hvd::Status&) {};
  std::lock_guard<std::mutex> lock(queue.mutex_);
  queue.tensor_table_.emplace(wire_name, std::move(entry));
}

// --- Transport

bool Session::Alive() const {
  const hvd::HorovodGlobalState* state = state_;
  return state != nullptr && !retired_ && !ControllerIsGone() && state->initialization_done && !state->shut_down;
}

void Session::CheckInterrupt() {
  if (const auto& interrupt = InterruptFunction()) interrupt();
}

void Session::SetInterrupt(std::function<void()> interrupt) { InterruptFunction() = std::move(interrupt); }

hvd::TensorTableEntry Session::MakeEntry(const std::shared_ptr<BucketHandle>& bucket, const Bucket::Entry& entry) {
  const BucketConfig& config = bucket->config;
  const hvd::DataType type = HorovodType(config.options.type);
  const auto bytes = static_cast<std::int64_t>(bucket->core.bytes());
  hvd::TensorTableEntry made;
  made.tensor_name = WireName(bucket->core.name());
  made.context = std::make_shared<BucketContext>(bucket->core.memory());
  made.device = bucket->core.memory().device();
  made.process_set_id = process_set_id_;
  if (!entry.member) {
    made.tensor = made.output = std::make_shared<TensorView>(nullptr, type, std::vector<std::int64_t>{0}, 0);
    made.callback = [](const hvd::Status&) {};
    return made;
  }
  made.tensor = std::make_shared<TensorView>(entry.input, type, config.shape, bytes);
  made.output = std::make_shared<TensorView>(entry.output, type, config.shape, bytes);
  made.callback = [self = shared_from_this(), bucket](const hvd::Status& status) {
    const std::string error = status.ok() ? "" : status.reason();
    self->engine_.Finished(bucket, error.empty() && !status.ok() ? "the reduction failed" : error);
  };
  return made;
}

// Puts entry and request where Horovod's own Enqueue would. Not through it: it would register a group for each tensor
// when group fusion is off, and a rank whose entry is made late would have none.
std::string Session::Submit(const std::shared_ptr<BucketHandle>& bucket, const Bucket::Entry& entry) {
  const BucketConfig& config = bucket->config;
  hvd::Request request;
  request.set_request_rank(rank_);
  request.set_request_type(hvd::Request::ALLREDUCE);
  request.set_tensor_name(WireName(bucket->core.name()));
  request.set_tensor_type(HorovodType(config.options.type));
  request.set_tensor_shape(config.shape);
  request.set_device(bucket->core.memory().device());
  request.set_reduce_op(TravellingSum());
  request.set_prescale_factor(config.prescale_factor);
  request.set_postscale_factor(config.postscale_factor);
  hvd::TensorTableEntry made = MakeEntry(bucket, entry);

  const auto controller = alive_.lock();
  if (controller == nullptr) return hvd::SHUT_DOWN_ERROR.reason();
  auto& queue = QueueAccess::Of(*controller);
  for (int tries = 0; tries < kStandInMilliseconds; ++tries) {
    {
      std::lock_guard<std::mutex> lock(queue.mutex_);
      // Under the queue's lock: a shutdown that we do not see yet will find this entry and call it back.
      if (!Alive()) return hvd::SHUT_DOWN_ERROR.reason();
      if (queue.tensor_table_.count(made.tensor_name) == 0) {
        queue.tensor_table_.emplace(made.tensor_name, std::move(made));
        queue.message_queue_.push(std::move(request));
        return {};
      }
    }
    // What stood in for this rank, zeros or nothing, waits for its turn behind what is being reduced.
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return hvd::DUPLICATE_NAME_ERROR.reason();
}

void Session::Retract(const BucketHandle& bucket) {
  const std::string name = WireName(bucket.core.name());
  auto& queue = QueueAccess::Of(controller_);
  std::lock_guard<std::mutex> lock(queue.mutex_);
  queue.tensor_table_.erase(name);
  for (std::size_t left = queue.message_queue_.size(); left > 0; --left) {
    hvd::Request request = std::move(queue.message_queue_.front());
    queue.message_queue_.pop();
    if (request.tensor_name() != name) queue.message_queue_.push(std::move(request));
  }
}

void Session::Place(const std::shared_ptr<BucketHandle>& bucket, const Bucket::Entry& entry) {
  hvd::TensorTableEntry made = MakeEntry(bucket, entry);
  auto& queue = QueueAccess::Of(controller_);
  std::lock_guard<std::mutex> lock(queue.mutex_);
  queue.tensor_table_.emplace(made.tensor_name, std::move(made));
}

}  // namespace horovod_partial::attach
