#include "attach/session.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "attach/device.h"
#include "attach/envelope.h"
#include "attach/tensors.h"
#include "engine/farewell.h"
#include "engine/log.h"

namespace horovod_partial::attach {
namespace {

// Status bits of Horovod's cache coordinator. They are inverted: a cleared bit says yes, and one rank's yes is enough.
constexpr long long kShouldShutDown = 1LL << 0;
constexpr long long kUncachedInQueue = 1LL << 1;

constexpr Time kShortCycle = std::chrono::microseconds(100);
constexpr int kShortCycles = 20;

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

const std::shared_ptr<FirstFailure>& ProcessFirstFailure() {
  static const auto* failure = new std::shared_ptr<FirstFailure>(std::make_shared<FirstFailure>());
  return *failure;
}

std::string Failed(Rank rank) { return "rank " + std::to_string(rank) + " has failed: "; }

bool HasOurs(const hvd::ResponseList& responses) {
  return std::any_of(responses.responses().begin(), responses.responses().end(),
                     [](const hvd::Response& response) { return IsOurs(response); });
}

hvd::DataType HorovodType(DataType type) { return static_cast<hvd::DataType>(type); }

// Returns how long ranks may wait for each other before that is a deadlock: kNever if Horovod's stall check is off, its
// warning time (1 s at least) if the user has set one, else our default.
Time DeadlockAfter(hvd::Controller& controller) {
  const auto& inspector = StallInspectorAccess::Of(controller);
  if (!inspector.perform_stall_check) return kNever;
  if (std::getenv("HOROVOD_STALL_CHECK_TIME_SECONDS") == nullptr) return Coordinator::kDeadlockAfter;
  return std::chrono::seconds(std::max(1, inspector.stall_warning_time_seconds));
}

}  // namespace

Session::Session(hvd::Controller& controller, const Engine::Thresholds& thresholds)
    : controller_(controller),
      alive_(controller.weak_from_this()),
      rank_(controller.GetRank()),
      size_(controller.GetSize()),
      outstanding_(controller),
      joined_(static_cast<std::size_t>(size_), false),
      coordinator_(controller.IsCoordinator() ? std::make_unique<Coordinator>(size_) : nullptr),
      engine_(*this, rank_, size_, thresholds, PossibleArrivalsOfProcess(), ProcessFirstFailure()) {}

void Session::Retire() {
  retired_ = true;
  outstanding_.Leave();
  engine_.Close("Horovod has been initialised anew; what was pending is gone");
}

void Session::SetState(hvd::HorovodGlobalState& state, std::int32_t process_set_id,
                       std::shared_ptr<recording::Recorder> recorder, bool waits_are_told) {
  process_set_id_ = process_set_id;
  recorder_ = std::move(recorder);
  engine_.SetRecorder(recorder_, process_set_id);
  engine_.SetWaitsAreTold(waits_are_told);
  if (process_set_id == 0) ProcessFirstFailure()->Forget();
  process_set_ = &state.process_set_table.Get(process_set_id);
  if (process_set_id != 0) members_ = process_set_->registered_global_ranks;
  communicators_ = std::make_unique<GroupCommunicators>(state, *process_set_, rank_, size_);
  if (coordinator_ != nullptr)
    coordinator_->SetDeadlockAfter(process_set_id == 0 ? DeadlockAfter(controller_) : kNever);
  state_ = &state;
  WatchForShutdown();
}

// Adds an entry that is never reduced. Horovod calls every entry back when it shuts down, so this one tells of that.
// Its callback comes with the queue's lock held, and must not close buckets. So a thread of its own does that.
void Session::WatchForShutdown() {
  hvd::TensorTableEntry entry;
  entry.tensor_name = WireName("");
  entry.context = std::make_shared<BucketContext>(Memory::Host());
  entry.tensor = entry.output =
      std::make_shared<TensorView>(nullptr, hvd::HOROVOD_UINT8, std::vector<std::int64_t>{0}, 0);
  entry.process_set_id = process_set_id_;
  entry.callback = [session = weak_from_this()](const hvd::Status& status) {
    const auto self = session.lock();
    if (self == nullptr) return;
    self->outstanding_.Leave();
    // That thread must read nothing global: the process may be about to end.
    std::thread([self, reason = status.reason()] { self->engine_.Close(reason); }).detach();
  };
  auto& queue = QueueAccess::Of(controller_);
  std::lock_guard<std::mutex> lock(queue.mutex_);
  queue.tensor_table_.emplace(entry.tensor_name, std::move(entry));
}

std::string Session::MissingHooks() const {
  static const char* const names[] = {"SendReadyTensors", "RecvReadyTensors", "SendFinalTensors", "RecvFinalTensors"};
  const unsigned expected =
      coordinator_ != nullptr ? kRecvReadyTensors | kSendFinalTensors : kSendReadyTensors | kRecvFinalTensors;
  const unsigned missing = expected & ~hooks_run_;
  std::string text;
  for (unsigned i = 0; i < std::size(names); ++i)
    if ((missing >> i & 1u) != 0) text += (text.empty() ? "" : ", ") + std::string(names[i]);
  return text;
}

Session::OfCoordinator Session::StatisticsOfCoordinator() const {
  if (coordinator_ == nullptr) return {};
  std::lock_guard<std::mutex> lock(coordinator_mutex_);
  return {coordinator_->ArrivalOffsets(), coordinator_->UnconnectedWindows()};
}

// Runs the body of a hook. An exception that leaves a hook would end Horovod's loop, and the other ranks would fail
// without the reason. So it is caught here, and all ranks shut down in good order.
void Session::Guard(const char* hook, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    // An EngineError explains itself. Any other error is a defect of ours.
    const bool explained = dynamic_cast<const EngineError*>(&error) != nullptr;
    const std::string text = explained ? error.what() : std::string("internal error in ") + hook + ": " + error.what();
    Log(LogLevel::kError, rank_, text + "; all ranks shut down" + (explained ? "" : ". Please report this"));
    if (failed_.exchange(true)) return;
    failure_ = text;
    if (process_set_id_ == 0) ProcessFirstFailure()->Hear(Failed(rank_) + text);
  }
}

// --- Background thread

void Session::EndIfBroken() const {
  if (!broken_.empty()) throw std::runtime_error("a reduction failed: " + broken_);
}

const std::shared_ptr<PossibleArrivals>& PossibleArrivalsOfProcess() {
  static const auto* bringers = new std::shared_ptr<PossibleArrivals>(std::make_shared<PossibleArrivals>());
  return *bringers;
}

PossibleArrivals::Wait Session::LongestWait() { return PossibleArrivalsOfProcess()->LongestWait(); }

Time Session::ForeignSince(Time now) {
  if (state_ == nullptr) return kNever;
  ++cycles_;
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
      ++foreign_changes_;
      return now;
    }
  }
  if (!still_there) {
    foreign_changes_ += foreign_.empty() ? 0 : 1;
    foreign_.clear();
    foreign_context_.reset();
    foreign_since_ = kNever;
  }
  return foreign_since_;
}

void Session::Tick(std::vector<long long>& status_bits) {
  if (state_ == nullptr) return;
  Guard("CrossRankBitwiseAnd", [&] {
    const Time now = Now();
    RecordHanded(now);
    bool cycle = engine_.WantsCycle(now, ForeignSince(now));
    if (coordinator_ != nullptr) {
      cycle = cycle || coordinator_->NextDeadline() <= now;
      WatchWaits(now);
    }
    if (cycle) status_bits[0] &= ~kUncachedInQueue;
  });
  // The last cycle must negotiate, because its messages tell the other ranks the reason.
  if (failed_) status_bits[0] &= ~(kUncachedInQueue | kShouldShutDown);
}

// After a cycle that negotiates, the next kShortCycles cycles are short. Otherwise, where ranks take turns at small
// tensors, half of Horovod's cycle time passes before it notices an arrival. All ranks count in the same way, because a
// rank that sleeps holds up the cycles of all. Only a few cycles are short, so neither an idle job nor a long wait
// costs more than before. A cycle time that the user has set is kept.
void Session::AfterTick(const std::vector<long long>& status_bits) {
  if (state_ == nullptr || process_set_id_ != 0 || keeps_cycle_time_) return;
  const bool negotiates = (status_bits[0] & kUncachedInQueue) == 0;
  short_cycles_ = negotiates ? kShortCycles : std::max(0, short_cycles_ - 1);
  if (short_cycles_ == 0) return;
  hvd::HorovodGlobalState& state = *state_;
  const auto usual = std::chrono::duration<double, std::milli>(state.parameter_manager.CycleTimeMs());
  const auto saved = std::chrono::duration_cast<Time>(usual) - kShortCycle;
  if (saved > Time(0)) state.last_cycle_start -= saved;  // Horovod sleeps until one cycle time after this
}

// Warns of long waits, and ends the job after longer ones, by the settings of Horovod's stall inspector. That inspector
// sees no request of ours.
void Session::WatchWaits(Time now) {
  const auto& inspector = StallInspectorAccess::Of(controller_);
  const Time warn_after = std::chrono::seconds(inspector.stall_warning_time_seconds);
  const Time end_after = std::chrono::seconds(inspector.stall_shutdown_time_seconds);
  if (!inspector.perform_stall_check || now - last_watch_ < warn_after / 10) return;
  last_watch_ = now;
  const std::string waits = coordinator_->DescribeWaits(now - warn_after);
  const bool ends = end_after > Time(0) && end_after >= warn_after && coordinator_->OldestWait() < now - end_after;
  if (waits == warned_ && !ends) return;
  warned_ = waits;
  if (waits.empty()) return;
  const std::string text = "waiting for " + std::to_string(inspector.stall_warning_time_seconds) + " s and longer: ";
  Log(LogLevel::kWarning, rank_, text + waits);
  if (!ends) return;
  Log(LogLevel::kError, rank_, "all ranks shut down, as HOROVOD_STALL_SHUTDOWN_TIME_SECONDS says");
  failed_ = true;
}

void Session::BeforeSendReady(hvd::RequestList& requests) {
  hooks_run_ |= kSendReadyTensors;
  if (state_ == nullptr) return;
  if (!failed_) {
    Guard("SendReadyTensors", [&] {
      const Time now = Now();
      RecordHanded(now);
      const Report report = engine_.BuildReport(now, ForeignSince(now), process_set_->joined);
      if (!report.empty()) requests.add_request(Enclose(report, rank_));
    });
  }
  if (!failed_) return;
  Report farewell;
  farewell.failure = failure_;
  if (!farewell.empty()) requests.add_request(Enclose(farewell, rank_));
  requests.set_shutdown(true);
}

void Session::AfterRecvReady(std::vector<std::string>& ready_to_reduce, std::vector<hvd::RequestList>& ready) {
  hooks_run_ |= kRecvReadyTensors;
  if (state_ == nullptr) return;
  Guard("RecvReadyTensors", [&] {
    std::lock_guard<std::mutex> lock(coordinator_mutex_);
    const Time now = Now();
    RecordHanded(now);
    WatchWaits(now);
    bool ends = failed_;  // then nothing is decided: a failed rank could only take part with zeros
    if (ends && !failure_.empty()) NoteFailure(0, failure_);
    // Takes our reports out of the other ranks' messages, because Horovod would count them.
    for (Rank rank = 1; rank < size_; ++rank) {
      auto& list = ready[static_cast<std::size_t>(rank)];
      Report report;
      std::vector<hvd::Request> others;
      for (const auto& request : list.requests()) {
        if (auto opened = Open(request)) {
          report = std::move(*opened);
          continue;
        }
        if (request.request_type() == hvd::Request::JOIN) {
          joined_[static_cast<std::size_t>(rank)] = true;
          join_devices_[rank] = request.device();
        }
        others.push_back(request);
      }
      if (others.size() < list.requests().size()) list.set_requests(others);
      ends = ends || (list.shutdown() && !report.failure.empty());
      Observe(rank, report, now);
    }
    joined_[0] = process_set_->joined;
    if (joined_[0]) join_devices_[0] = OwnJoinDevice();
    std::vector<Closing> closings;
    if (!ends) {
      Observe(0, engine_.BuildReport(now, ForeignSince(now), joined_[0]), now);
      coordinator_->SetJoined(joined_);
      closings = coordinator_->Decide(now);
      grants_ = coordinator_->grants();
      RecordDecisions(closings, now);
      if (!coordinator_->deadlock().empty()) {
        Closing& deadlock = closings.emplace_back();
        deadlock.bucket = FirstFailure::kDeadlock;
        deadlock.error = coordinator_->deadlock();
      }
    }
    if (!failures_.empty()) {
      Closing& farewell = closings.emplace_back();
      farewell.bucket = Farewell::kBucket;
      farewell.error = std::exchange(failures_, "");
    }
    // Looked up only if something closes: most cycles close nothing.
    const std::string refusal = closings.empty() ? "" : GroupCommunicators::Refusal(*state_);
    for (auto& closing : closings) {
      if (closing.ends && !refusal.empty()) closing.groups.clear();  // then all ranks reduce together, some with zeros
      const bool grouped = !closing.groups.empty() || !closing.upcoming.empty();
      if (closing.error.empty() && grouped && !refusal.empty())
        closing.error = "groups of ranks do not work with Horovod's operation " + refusal + ".";
      if (closing.error.empty()) closing.error = JoinRefusal(closing.bucket);
    }
    // On rank 0 the round begins here and not when the responses are known, because Horovod looks the entries up when
    // it fuses responses.
    engine_.Begin(closings, joined_[0]);
    std::vector<std::vector<hvd::Request>> rows;
    for (const auto& closing : closings) {
      const std::vector<hvd::Request>& row = rows.emplace_back(RowOf(closing));
      std::int64_t elements = 1;
      for (const std::int64_t dimension : row[0].tensor_shape()) elements *= dimension;
      if (joined_[0]) continue;
      if (closing.error.empty()) {
        PlaceZeros(closing.bucket, row[0].tensor_type(), elements, row[0].device());
      } else {
        PlaceZeros(closing.bucket, hvd::HOROVOD_UINT8, 0, CPU_DEVICE_ID);
      }
    }
    // From here on nothing may fail: a row that is added is reduced on every rank.
    hvd::Timeline& timeline = ControllerAccess::Of(controller_).timeline_;
    for (std::size_t i = 0; i < closings.size(); ++i) {
      const std::string name = WireName(closings[i].bucket);
      timeline.NegotiateStart(name, hvd::Request::ALLREDUCE);  // if nobody has arrived, this is its first call
      timeline.NegotiateEnd(name);
      ControllerAccess::Of(controller_).message_table_[name] = std::move(rows[i]);
      ready_to_reduce.push_back(name);
      closed_[name] = std::move(closings[i]);
    }
  });
}

void Session::Observe(Rank rank, const Report& report, Time now) {
  hvd::Timeline& timeline = ControllerAccess::Of(controller_).timeline_;
  for (const auto& item : report.items) {
    if (item.kind != Report::Item::Kind::kArrival) continue;
    timeline.NegotiateStart(WireName(item.bucket), hvd::Request::ALLREDUCE);
    timeline.NegotiateRankReady(WireName(item.bucket), rank);
  }
  if (!report.failure.empty()) NoteFailure(rank, report.failure);
  coordinator_->Observe(rank, report, now);
}

void Session::NoteFailure(Rank rank, const std::string& failure) {
  failures_ += failures_.empty() ? Failed(rank) + failure : "; so has rank " + std::to_string(rank);
}

// Returns the requests for Horovod's response: one for each rank, also for joined ranks, because Horovod finds a rank's
// device by the rank. The requests agree with each other, so Horovod never refuses them.
std::vector<hvd::Request> Session::RowOf(const Closing& closing) const {
  // A refused round is an error on every rank, and reduces nothing. The coordinator may not know its bucket.
  static const auto* const nothing = new Declaration;
  const bool refused = !closing.error.empty();
  const Declaration& declaration = refused ? *nothing : coordinator_->declaration(closing.bucket);
  hvd::Request request;
  request.set_request_type(hvd::Request::ALLREDUCE);
  request.set_tensor_name(WireName(closing.bucket));
  request.set_tensor_type(HorovodType(declaration.type));
  request.set_tensor_shape(declaration.shape);
  request.set_reduce_op(TravellingSum());
  request.set_prescale_factor(declaration.prescale_factor);
  request.set_postscale_factor(declaration.postscale_factor);
  std::vector<hvd::Request> row(static_cast<std::size_t>(size_), request);
  for (Rank rank = 0; rank < size_; ++rank) {
    row[static_cast<std::size_t>(rank)].set_request_rank(rank);
    row[static_cast<std::size_t>(rank)].set_device(refused ? CPU_DEVICE_ID
                                                           : coordinator_->device(closing.bucket, rank));
  }
  return row;
}

namespace {

// Fusing saves the latency of a reduction, and costs a copy into the fusion buffer and one out of it. For a tensor of
// this size the copies cost more (4 ranks on one machine: from 256 KiB on over MPI, from 4 MiB on over Gloo).
constexpr std::int64_t kLargeBytes = 4 << 20;

// Splits fused responses of ours: large tensors and refused tensors get a response of their own. Large tensors are then
// reduced where they lie. The tensors that stay together have the same groups.
std::vector<hvd::Response> Unfused(const std::vector<hvd::Response>& responses,
                                   const std::map<std::string, Closing>& closed) {
  std::vector<hvd::Response> list;
  for (const auto& response : responses) {
    if (!IsOurs(response) || response.tensor_names().size() < 2) {
      list.push_back(response);
      continue;
    }
    const auto element_bytes = static_cast<std::int64_t>(SizeOf(static_cast<DataType>(response.tensor_type())));
    std::map<Partition, std::size_t> together;  // index in the list of the response for these groups
    for (std::size_t i = 0; i < response.tensor_names().size(); ++i) {
      const std::string& name = response.tensor_names()[i];
      const std::int64_t elements = response.tensor_sizes()[i];
      const Closing& closing = closed.at(name);
      const bool alone = elements * element_bytes >= kLargeBytes || !closing.error.empty();
      const auto known = alone ? together.end() : together.find(closing.groups);
      if (known != together.end()) {
        list[known->second].add_tensor_name(name);
        list[known->second].add_tensor_size(elements);
        continue;
      }
      if (!alone) together[closing.groups] = list.size();
      list.push_back(response);
      list.back().set_tensor_names({name});
      list.back().set_tensor_sizes({elements});
    }
  }
  return list;
}

}  // namespace

// A hook has failed on rank 0: adds a response that carries the reason, unless there is one already.
void Session::SayWhy(hvd::ResponseList& responses) {
  const std::string name = WireName(Farewell::kBucket);
  if (failure_.empty() || process_set_->joined || closed_.count(name) > 0) return;
  PlaceZeros(Farewell::kBucket, hvd::HOROVOD_UINT8, 0, CPU_DEVICE_ID);
  Closing& farewell = closed_[name];
  farewell.bucket = Farewell::kBucket;
  farewell.error = Failed(rank_) + failure_;
  hvd::Response response;
  response.set_response_type(hvd::Response::ERROR);
  response.set_tensor_names({name});
  responses.add_response(response);
}

namespace {

// No bucket has this name. The response of this name carries grants.
constexpr const char* kGrants = "horovod_partial.grants";

// Takes the response with the grants of this cycle, if there is one, out of the responses, because Horovod must not
// execute it. It is the last one.
std::vector<Grants> TakeGrants(hvd::ResponseList& responses) {
  const auto& last = responses.responses().back();
  if (last.tensor_names().empty() || last.tensor_names()[0] != WireName(kGrants)) return {};
  std::vector<Grants> grants = DecodeGrants(last.error_message());
  std::vector<hvd::Response> others = responses.responses();
  others.pop_back();
  responses.set_responses(others);
  return grants;
}

}  // namespace

void Session::BeforeSendFinal(hvd::ResponseList& responses) {
  hooks_run_ |= kSendFinalTensors;
  if (state_ == nullptr) return;
  if (failed_) {
    responses.set_shutdown(true);
    SayWhy(responses);
  }
  Guard("SendFinalTensors", [&] {
    std::lock_guard<std::mutex> lock(coordinator_mutex_);
    for (const auto& response : responses.responses())
      if (response.response_type() == hvd::Response::JOIN) joined_.assign(joined_.size(), false);
    if (!HasOurs(responses) && grants_.empty()) return;
    std::vector<hvd::Response> list = Unfused(responses.responses(), closed_);
    for (auto& response : list) {
      if (!IsOurs(response)) continue;
      const std::string& name = response.tensor_names()[0];
      const std::string& error = closed_.at(name).error;
      if (!error.empty()) {
        response.set_response_type(hvd::Response::ERROR);
        response.set_error_message(error);
        coordinator_->Forget(BucketName(name));
        continue;
      }
      std::vector<Closing> closings;
      for (const auto& name : response.tensor_names()) closings.push_back(closed_.at(name));
      Enclose(closings, response);
    }
    if (!grants_.empty()) {
      hvd::Response& response = list.emplace_back();
      response.set_response_type(hvd::Response::ERROR);
      response.set_tensor_names({WireName(kGrants)});
      response.set_error_message(Encode(std::exchange(grants_, {})));
    }
    responses.set_responses(list);
  });
}

namespace {

// Makes ordinary sums of our responses, which Horovod then executes. The list of devices keeps one element more than
// there are ranks. So Horovod does not cache the response, and finds NCCL's communicator again, which it keeps by the
// list of devices.
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
  if (state_ == nullptr) return;
  NoteJoin(responses);
  if (!HasOurs(responses)) return;
  Guard("SendFinalTensors", [&] {
    const std::vector<Grants> grants = TakeGrants(responses);
    OpenAll(responses);  // rank 0 has begun these rounds before
    engine_.Hear(grants);
  });
  closed_.clear();
  Unwrap(responses, size_);
}

void Session::AfterRecvFinal(hvd::ResponseList& responses) {
  hooks_run_ |= kRecvFinalTensors;
  if (state_ == nullptr) return;
  NoteJoin(responses);
  if (!HasOurs(responses)) return;
  Guard("RecvFinalTensors", [&] {
    const std::vector<Grants> grants = TakeGrants(responses);
    engine_.Begin(OpenAll(responses), process_set_->joined);
    engine_.Hear(grants);
  });
  Unwrap(responses, size_);
  FillMissing(responses);
}

void Session::NoteJoin(const hvd::ResponseList& responses) {
  for (const auto& response : responses.responses())
    if (response.response_type() == hvd::Response::JOIN) engine_.ReturnFromJoin();
}

// Returns the closings of a cycle. Notes those with groups, on joined ranks too, until Horovod executes them.
std::vector<Closing> Session::OpenAll(const hvd::ResponseList& responses) {
  if (!grouped_.empty())
    throw std::runtime_error(
        grouped_.begin()->first +
        " has groups, and Horovod reduced it over all ranks, with an operation that horovod-partial "
        "does not know. Turn hierarchical and torus allreduce off");
  std::vector<Closing> closings;
  for (const auto& response : responses.responses()) {
    if (!IsOurs(response)) continue;
    if (response.response_type() == hvd::Response::ERROR) {
      Closing refused;
      refused.bucket = BucketName(response.tensor_names()[0]);
      refused.error = response.error_message();
      closings.push_back(std::move(refused));
      continue;
    }
    for (auto& closing : Open(response, size_)) {
      if (!closing.groups.empty() || !closing.upcoming.empty()) grouped_[WireName(closing.bucket)] = closing;
      closings.push_back(std::move(closing));
    }
  }
  return closings;
}

// --- Recording

// Records how many tensors of Horovod's own operations have come since the last look. It counts too few if an operation
// other than an allreduce has taken tensors away meanwhile.
void Session::RecordHanded(Time now) {
  if (!recorder_->on()) return;
  std::size_t there;
  {
    auto& queue = QueueAccess::Of(controller_);
    std::lock_guard<std::mutex> lock(queue.mutex_);
    there = queue.tensor_table_.size();
  }
  if (there > known_) recorder_->Handed(now, static_cast<std::int64_t>(there - known_));
  known_ = there;
}

void Session::RecordReduction(const std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response,
                              Time begin, bool everyone) {
  const std::int64_t sequence = sequence_++;
  if (!recorder_->on()) return;
  const bool ours = IsOurs(response);
  const auto& names = response.tensor_names();
  const bool trains = !ours && !std::all_of(names.begin(), names.end(), IsAgreement);
  if (!ours) known_ -= std::min(known_, entries.size());
  std::int64_t bytes = 0;
  for (const auto& entry : entries) bytes += static_cast<std::int64_t>(entry.tensor->size());
  recorder_->Reduced({sequence, process_set_id_, trains ? &names : nullptr, begin, Now(),
                      static_cast<std::int64_t>(entries.size()), bytes, everyone});
}

void Session::RecordDecisions(const std::vector<Closing>& closings, Time now) const {
  if (!recorder_->on()) return;
  for (const Closing& closing : closings) {
    if (!closing.error.empty()) continue;
    const Declaration& declaration = coordinator_->declaration(closing.bucket);
    const Policy& policy = declaration.policy;
    recording::DecidedRound round{
        closing.round, now, NameOf(closing.reason), policy.quorum, closing.gradients(), {}, {}};
    if (policy.rule == Policy::Rule::kReady) round.quorum = policy.group_size;
    if (policy.rule == Policy::Rule::kAuto) round.quorum = closing.quorum;
    for (Rank rank = 0; rank < size_; ++rank) {
      const auto& contribution = closing.contributions[static_cast<std::size_t>(rank)];
      if (contribution.fresh) continue;
      round.missing.push_back(rank);
      if (contribution.gradients > 0) round.delivered.push_back(rank);
    }
    std::size_t bytes = SizeOf(declaration.type);
    for (const std::int64_t dimension : declaration.shape) bytes *= static_cast<std::size_t>(dimension);
    recorder_->Decided({process_set_id_, closing.bucket, policy.description, bytes}, round);
  }
}

// --- Execution

hvd::Status Session::Execute(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response,
                             Carrier carrier, const Reduce& reduce) {
  const Time begin = Now();
  std::vector<Closing> closings;  // of those rounds of the response that have groups, now or later
  if (IsOurs(response))
    for (const auto& name : response.tensor_names())
      if (auto noted = grouped_.extract(name)) closings.push_back(std::move(noted.mapped()));
  hvd::Status status =
      closings.empty() ? reduce(response) : ExecuteRounds(entries, response, carrier, reduce, closings);
  RecordReduction(entries, response, begin, closings.empty() || closings[0].groups.empty());
  return status;
}

hvd::Status Session::ExecuteRounds(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response,
                                   Carrier carrier, const Reduce& reduce, const std::vector<Closing>& closings) {
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
      hvd::Response mine = response;  // Horovod keeps NCCL's communicators by the list of devices
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
  if (communicators_->made() > made)
    engine_.RecordGroups(closings[0].bucket, communicators_->made() - made, communicators_->setup() - setup);
  return status;
}

// Horovod relies on an entry for each tensor of a response. This rank takes part with zeros where the engine has made
// no entry: if the bucket was first used while this rank had joined, if it has failed here, or if it is refused.
void Session::FillMissing(const hvd::ResponseList& responses) {
  if (process_set_->joined) return;
  for (const auto& response : responses.responses()) {
    if (!IsOurs(response)) continue;
    const bool error = response.response_type() == hvd::Response::ERROR;
    for (std::size_t i = 0; i < response.tensor_names().size(); ++i)
      PlaceZeros(BucketName(response.tensor_names()[i]), error ? hvd::HOROVOD_UINT8 : response.tensor_type(),
                 error ? 0 : response.tensor_sizes()[i],
                 error ? CPU_DEVICE_ID : response.devices()[static_cast<std::size_t>(rank_)]);
  }
}

void Session::PlaceZeros(const std::string& name, hvd::DataType type, std::int64_t elements, int device) {
  const std::string wire_name = WireName(name);
  auto& queue = QueueAccess::Of(controller_);
  {
    std::lock_guard<std::mutex> lock(queue.mutex_);
    if (queue.tensor_table_.count(wire_name) > 0) return;
  }
  // A bucket that has failed here still has its device. For a bucket that this rank never used, the response tells only
  // whether it lies on a GPU, not on which one.
  if (const auto config = Engine::ConfigOf(engine_.Find(name))) {
    device = config->memory->device();
  } else if (device != CPU_DEVICE_ID) {
    device = DeviceOfThisRank();
  }
  const auto bytes = static_cast<std::size_t>(elements) * SizeOf(static_cast<DataType>(type));
  auto zeros = std::make_shared<Buffer>();
  const auto make = [&](Memory& memory) {
    *zeros = {};
    zeros->Reserve(bytes, memory);
    if (bytes > 0) zeros->Zero();
  };
  try {
    try {
      make(MemoryOf(device));
    } catch (const std::exception&) {
      make(SpareMemoryOf(device));
    }
  } catch (const std::exception& error) {
    throw EngineError("rank " + std::to_string(rank_) + " cannot take part with zeros in " + name + ": " +
                      error.what());
  }
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

// Returns why a bucket cannot be reduced with the ranks that have joined, or "". Horovod puts a joined rank's zeros on
// the device that its join names. That must be of the same kind as the device of the other ranks' tensors: NCCL reads
// no memory of the host, and Gloo and MPI read none of a GPU.
std::string Session::JoinRefusal(const std::string& bucket) const {
  const auto on_host = [](int device) { return device == CPU_DEVICE_ID; };
  for (Rank rank = 0; rank < size_; ++rank) {
    if (!joined_[static_cast<std::size_t>(rank)]) continue;
    const bool joined_on_host = on_host(join_devices_.at(rank));
    if (joined_on_host == on_host(coordinator_->declaration(bucket).device)) continue;
    return "rank " + std::to_string(rank) + " has joined with " + (joined_on_host ? "the CPU" : "a GPU") +
           " as its device, and " + bucket + " lies on " + (joined_on_host ? "GPUs" : "CPUs") +
           ": give hvd.join the device=" + (joined_on_host ? " of that rank's tensors" : "-1") +
           " there, or with TensorFlow train and join on the same kind of device.";
  }
  return "";
}

int Session::OwnJoinDevice() const {
  auto& queue = QueueAccess::Of(controller_);
  std::lock_guard<std::mutex> lock(queue.mutex_);
  return queue.tensor_table_.at(JOIN_TENSOR_NAME).device;
}

int Session::DeviceOfThisRank() const {
  const int used = engine_.device();
  return used != CPU_DEVICE_ID ? used : DefaultDevice(controller_.GetLocalRank());
}

// --- Collectives

bool Session::Alive() const {
  const hvd::HorovodGlobalState* state = state_;
  return state != nullptr && !retired_ && !ControllerIsGone() && state->initialization_done && !state->shut_down;
}

void Session::CheckInterrupt() {
  if (const auto& interrupt = InterruptFunction()) interrupt();
}

void Session::SetInterrupt(std::function<void()> interrupt) { InterruptFunction() = std::move(interrupt); }

// Puts the entry into Horovod's table, like Horovod's own Enqueue, but without a request.
void Session::Place(const std::shared_ptr<SharedBucket>& bucket, const std::string& name, const BucketConfig& config,
                    const Bucket::Entry& entry) {
  const hvd::DataType type = HorovodType(config.type);
  const auto bytes = static_cast<std::int64_t>(config.bytes());
  hvd::TensorTableEntry made;
  made.tensor_name = WireName(name);
  made.context = std::make_shared<BucketContext>(*config.memory);
  made.device = config.memory->device();
  made.process_set_id = process_set_id_;
  if (entry.member) {
    made.tensor = std::make_shared<TensorView>(entry.input, type, config.shape, bytes);
    made.output = std::make_shared<TensorView>(entry.output, type, config.shape, bytes);
    made.callback = [self = shared_from_this(), bucket](const hvd::Status& status) {
      const std::string error = status.ok() ? "" : status.reason();
      self->engine_.Finished(bucket, error.empty() && !status.ok() ? "the reduction failed" : error);
    };
  } else {
    made.tensor = made.output = std::make_shared<TensorView>(nullptr, type, std::vector<std::int64_t>{0}, 0);
    made.callback = [](const hvd::Status&) {};
  }
  auto& queue = QueueAccess::Of(controller_);
  std::lock_guard<std::mutex> lock(queue.mutex_);
  const std::string wire_name = made.tensor_name;
  if (!queue.tensor_table_.emplace(wire_name, std::move(made)).second)
    throw std::logic_error("Horovod has an entry for " + wire_name + " already");
}

}  // namespace horovod_partial::attach
