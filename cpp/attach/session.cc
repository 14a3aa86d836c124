#include "attach/session.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "attach/envelope.h"
#include "engine/farewell.h"
#include "engine/log.h"

namespace horovod_partial::attach {
namespace {

// Status bits of Horovod's cache coordinator. They are inverted: a cleared bit says yes, and one rank's yes is enough.
constexpr long long kShouldShutDown = 1LL << 0;
constexpr long long kUncachedInQueue = 1LL << 1;

constexpr Time kShortCycle = std::chrono::microseconds(100);
constexpr int kShortCycles = 20;

// Both are never freed, because waits and Horovod's thread may outlive static objects.
auto& interrupt_function = *new std::function<void()>;
const auto& first_failure = *new std::shared_ptr<FirstFailure>(std::make_shared<FirstFailure>());

}  // namespace

Session::Session(hvd::Controller& controller, const Engine::Thresholds& thresholds)
    : controller_(controller),
      alive_(controller.weak_from_this()),
      outstanding_(controller),
      coordination_(controller.IsCoordinator() ? std::make_unique<Coordination>(controller) : nullptr),
      engine_(*this, controller.GetRank(), controller.GetSize(), thresholds, PossibleArrivalsOfProcess(),
              first_failure) {}

void Session::Retire() {
  retired_ = true;
  outstanding_.Leave();
  engine_.Close("Horovod has been initialised anew; pending contributions are lost");
}

void Session::SetState(hvd::HorovodGlobalState& state, std::int32_t process_set_id,
                       std::shared_ptr<recording::Recorder> recorder, bool waits_are_told) {
  process_set_id_ = process_set_id;
  recorder_ = std::move(recorder);
  engine_.SetUp(recorder_, process_set_id, waits_are_told);
  if (process_set_id == 0) first_failure->Forget();
  process_set_ = &state.process_set_table.Get(process_set_id);
  if (process_set_id != 0) members_ = process_set_->registered_global_ranks;
  communicators_.emplace(state, *process_set_, engine_.rank(), engine_.size());
  entries_.emplace(controller_, process_set_id, engine_);
  record_.emplace(controller_, process_set_id, recorder_);
  if (coordination_ != nullptr) coordination_->Begin(state, process_set_id == 0);
  state_ = &state;
  // When Horovod shuts down, it calls a callback of ours, which starts a thread that closes the buckets. The callback
  // must not close the buckets itself, because Horovod holds the lock of its tensor queue during the call.
  entries_->AddForShutdown([session = weak_from_this()](const std::string& reason) {
    const auto self = session.lock();
    if (self == nullptr) return;
    self->outstanding_.Leave();
    // This thread must use no global objects, because the process may be about to end.
    std::thread([self, reason] { self->engine_.Close(reason); }).detach();
  });
}

std::string Session::MissingHooks() const {
  std::string text = ready_hook_ran_ ? "" : coordination_ != nullptr ? "RecvReadyTensors" : "SendReadyTensors";
  if (!final_hook_ran_) text += std::string(text.empty() ? "" : ", ") + FinalHook();
  return text;
}

Coordination::Statistics Session::StatisticsOfCoordinator() const {
  return coordination_ == nullptr ? Coordination::Statistics() : coordination_->statistics();
}

// Runs the body of a hook. An exception that leaves a hook would end Horovod's loop, and the other ranks would fail
// without the reason. So this function catches exceptions, and all ranks shut down in good order.
void Session::Guard(const char* hook, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    // The text of an EngineError explains the error. Any other exception is a defect of ours.
    const bool explained = dynamic_cast<const EngineError*>(&error) != nullptr;
    const std::string text = explained ? error.what() : std::string("internal error in ") + hook + ": " + error.what();
    Log(LogLevel::kError, engine_.rank(), text + "; all ranks shut down" + (explained ? "" : ". Please report this"));
    if (failed_.exchange(true)) return;
    failure_ = text;
    if (process_set_id_ == 0) first_failure->Hear(Failed(engine_.rank()) + text);
  }
}

void Session::EndIfBroken() const {
  if (!broken_.empty()) throw std::runtime_error("a reduction failed: " + broken_);
}

const std::shared_ptr<PossibleArrivals>& PossibleArrivalsOfProcess() {
  static const auto* arrivals = new std::shared_ptr<PossibleArrivals>(std::make_shared<PossibleArrivals>());
  return *arrivals;
}

Time Session::ForeignSince(Time now) {
  ++cycles_;
  const auto& arrivals = PossibleArrivalsOfProcess();
  if (arrivals->AwaitsForeign()) arrivals->EndForeignWaits(OutstandingWatch::All(*state_));
  return foreign_.Since(*state_, now);
}

void Session::Tick(std::vector<long long>& status_bits) {
  if (state_ == nullptr) return;
  Guard("CrossRankBitwiseAnd", [&] {
    const Time now = Now();
    record_->Handed(now);
    bool cycle = engine_.WantsCycle(now, ForeignSince(now));
    if (coordination_ != nullptr) {
      cycle = cycle || coordination_->WantsCycle(now);
      if (coordination_->WatchWaits(now)) failed_ = true;
    }
    if (cycle) status_bits[0] &= ~kUncachedInQueue;
  });
  // A failed rank asks for a shutdown, and makes this cycle negotiate, so that messages can say why the job ends.
  if (failed_) status_bits[0] &= ~(kUncachedInQueue | kShouldShutDown);
}

// Makes the next kShortCycles cycles short after a cycle that negotiates. Otherwise half of Horovod's cycle time passes
// before an arrival is noticed. That matters if ranks take turns at small tensors. All ranks shorten the same cycles,
// because a rank that sleeps holds up the cycles of all ranks. Only a few cycles are short, so that an idle job and a
// long wait cost little. If the user has set a cycle time, no cycle is shortened.
void Session::AfterTick(const std::vector<long long>& status_bits) {
  if (state_ == nullptr || process_set_id_ != 0 || keeps_cycle_time_) return;
  const bool negotiates = (status_bits[0] & kUncachedInQueue) == 0;
  short_cycles_ = negotiates ? kShortCycles : std::max(0, short_cycles_ - 1);
  if (short_cycles_ == 0) return;
  hvd::HorovodGlobalState& state = *state_;
  const auto usual = std::chrono::duration<double, std::milli>(state.parameter_manager.CycleTimeMs());
  const auto saved = std::chrono::duration_cast<Time>(usual) - kShortCycle;
  if (saved > Time(0)) state.last_cycle_start -= saved;  // Horovod sleeps until last_cycle_start plus the cycle time
}

void Session::BeforeSendReady(hvd::RequestList& requests) {
  ready_hook_ran_ = true;
  if (state_ == nullptr) return;
  if (!failed_) {
    Guard("SendReadyTensors", [&] {
      const Time now = Now();
      record_->Handed(now);
      const Report report = engine_.BuildReport(now, ForeignSince(now), process_set_->joined);
      if (!report.empty()) requests.add_request(Enclose(report, engine_.rank()));
    });
  }
  if (!failed_) return;
  Report farewell;
  farewell.failure = failure_;
  if (!farewell.empty()) requests.add_request(Enclose(farewell, engine_.rank()));
  requests.set_shutdown(true);
}

void Session::AfterRecvReady(std::vector<std::string>& ready_to_reduce, std::vector<hvd::RequestList>& ready) {
  ready_hook_ran_ = true;
  if (state_ == nullptr) return;
  Guard("RecvReadyTensors", [&] {
    const Time now = Now();
    record_->Handed(now);
    if (coordination_->WatchWaits(now)) failed_ = true;
    if (failed_ && !failure_.empty()) coordination_->NoteFailure(0, failure_);
    const bool fails = coordination_->TakeReports(ready, now) || failed_;
    const bool joined = process_set_->joined;
    // If a rank has failed, no round closes in this cycle, because that rank could only contribute zeros.
    std::optional<Report> own;
    if (!fails) own = engine_.BuildReport(now, ForeignSince(now), joined);
    std::vector<Closing> closings = coordination_->Decide(own ? &*own : nullptr, joined, now);
    record_->Decided(closings, *coordination_, now);
    // On rank 0 a round begins before Horovod makes the responses, because Horovod looks up the tensors when it fuses
    // responses.
    engine_.Begin(closings, joined);
    std::vector<std::vector<hvd::Request>> rows;
    for (const auto& closing : closings) {
      const hvd::Request& request = rows.emplace_back(coordination_->RowOf(closing)).front();
      if (joined) continue;
      const std::size_t elements = closing.error.empty() ? ElementsOf(request.tensor_shape()) : 0;
      entries_->AddZeros(closing.bucket, request.tensor_type(), static_cast<std::int64_t>(elements), request.device());
    }
    // From this call of Add on nothing may fail, because Horovod then reduces the rounds in this cycle.
    coordination_->Add(std::move(closings), std::move(rows), ready_to_reduce);
  });
}

void Session::BeforeSendFinal(hvd::ResponseList& responses) {
  if (state_ == nullptr) return;
  if (failed_) {
    responses.set_shutdown(true);
    const bool tells = !failure_.empty() && !process_set_->joined;
    if (tells && coordination_->AddFailure(failure_, responses))
      entries_->AddZeros(Farewell::kBucket, hvd::HOROVOD_FLOAT32, 0, CPU_DEVICE_ID);
  }
  Guard("SendFinalTensors", [&] { coordination_->Enclose(responses); });
}

void Session::AfterFinal(hvd::ResponseList& responses) {
  const bool decides = coordination_ != nullptr;
  final_hook_ran_ = true;
  if (state_ == nullptr) return;
  for (const auto& response : responses.responses())
    if (response.response_type() == hvd::Response::JOIN) engine_.ReturnFromJoin();
  if (!HasOurs(responses)) return;
  Guard(FinalHook(), [&] {
    const std::vector<Grants> grants = TakeGrants(responses);
    const std::vector<Closing> closings = OpenAll(responses);
    if (!decides) engine_.Begin(closings, process_set_->joined);  // rank 0 has begun these rounds already
    engine_.sharing().Hear(grants);
  });
  if (decides) coordination_->EndCycle();
  Unwrap(responses, engine_.size());
  if (!decides && !process_set_->joined) entries_->AddWhatIsMissing(responses);
}

// Returns which rounds close in a cycle. Keeps those with groups until Horovod executes them, also on joined ranks.
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
    for (auto& closing : Open(response, engine_.size())) {
      if (!closing.groups.empty() || !closing.upcoming.empty()) grouped_[WireName(closing.bucket)] = closing;
      closings.push_back(std::move(closing));
    }
  }
  return closings;
}

hvd::Status Session::Execute(hvd::AllreduceOp& operation, std::vector<hvd::TensorTableEntry>& entries,
                             const hvd::Response& response, Carrier carrier, const Reduce& reduce) {
  const Time begin = Now();
  std::vector<Closing> closings;  // the closings in this response that name groups, for this or later rounds
  if (IsOurs(response))
    for (const auto& name : response.tensor_names())
      if (auto noted = grouped_.extract(name)) closings.push_back(std::move(noted.mapped()));
  const int made = communicators_->made();
  const auto setup = communicators_->setup();
  hvd::Status status = closings.empty()
                           ? reduce(response)
                           : communicators_->Execute(closings, entries, response, carrier, operation, reduce);
  if (communicators_->made() > made)
    engine_.RecordGroups(closings[0].bucket, communicators_->made() - made, communicators_->setup() - setup);
  record_->Reduced(entries, response, begin, closings.empty() || closings[0].groups.empty());
  return status;
}

bool Session::Alive() const {
  const hvd::HorovodGlobalState* state = state_;
  return state != nullptr && !retired_ && !ControllerIsGone() && state->initialization_done && !state->shut_down;
}

void Session::CheckInterrupt() {
  if (interrupt_function) interrupt_function();
}

void Session::SetInterrupt(std::function<void()> interrupt) { interrupt_function = std::move(interrupt); }

void Session::Place(const std::shared_ptr<SharedBucket>& bucket, const std::string& name, const BucketConfig& config,
                    const Bucket::Entry& entry) {
  entries_->Add(name, config, entry, [self = shared_from_this(), bucket](const std::string& error) {
    self->engine_.Finished(bucket, error);
  });
}

}  // namespace horovod_partial::attach
