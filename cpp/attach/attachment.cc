#include "attach/attachment.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "attach/envelope.h"
#include "attach/horovod.h"
#include "attach/library.h"
#include "attach/tensors.h"
#include "core/rounds/declaration.h"
#include "core/values/bytes.h"
#include "engine/log.h"
#include "recording/recorder.h"

namespace horovod_partial::attach {
namespace {

// --- Sessions, by controller

class Registry {
 public:
  void Begin(hvd::Controller& controller) {
    std::vector<std::shared_ptr<Session>> over;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto it = sessions_.begin(); it != sessions_.end();) {
        const bool is_over = it->first == &controller || it->second->ControllerIsGone();
        if (is_over) over.push_back(std::move(it->second));
        it = is_over ? sessions_.erase(it) : std::next(it);
      }
      sessions_[&controller] = std::make_shared<Session>(controller, thresholds_);
    }
    for (const auto& session : over) session->Retire();  // without the lock, because it runs callbacks
  }
  std::shared_ptr<Session> Find(hvd::Controller& controller) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = sessions_.find(&controller);
    return it == sessions_.end() || it->second->ControllerIsGone() ? nullptr : it->second;
  }
  // Notes a library's state, which a handshake has found; every later generation has it at the same address.
  // `waits_are_told`: PossibleArrivals::Foreign::told.
  void Add(hvd::HorovodGlobalState& state, bool waits_are_told) {
    std::lock_guard<std::mutex> lock(mutex_);
    states_.emplace(&state, waits_are_told);
  }
  // For hooks, on Horovod's thread only: gives the session its state as soon as that is known. It does not hold the
  // lock while it uses Horovod's table of process sets, because Horovod calls DoInitialization with that table locked.
  std::shared_ptr<Session> FindForHook(hvd::Controller& controller) const {
    const auto session = Find(controller);
    if (session == nullptr || session->ready()) return session;
    std::map<hvd::HorovodGlobalState*, bool> states;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      states = states_;
    }
    for (const auto& [state, waits_are_told] : states)
      for (const std::int32_t id : state->process_set_table.Ids())
        if (state->process_set_table.Get(id).controller.get() == &controller)
          session->SetState(*state, id, RecorderOf(*state, *session), waits_are_told);
    return session;
  }
  std::vector<std::shared_ptr<Session>> Ready() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Session>> ready;
    for (const auto& [controller, session] : sessions_)
      if (session->ready()) ready.push_back(session);
    return ready;
  }
  void SetThresholds(const Engine::Thresholds& thresholds) {
    std::lock_guard<std::mutex> lock(mutex_);
    thresholds_ = thresholds;
  }

 private:
  // Returns the recorder of the generation, which all its process sets share. The process set of all ranks gets it
  // first.
  std::shared_ptr<recording::Recorder> RecorderOf(hvd::HorovodGlobalState& state, const Session& session) const {
    const auto global = Find(*state.process_set_table.Get(0).controller);
    if (global != nullptr && global->recorder() != nullptr) return global->recorder();
    const Engine& engine = session.engine();
    return std::make_shared<recording::Recorder>(
        recording::Recorder::Origin{engine.rank(), engine.size()},
        [rank = engine.rank()](const std::string& text) { Log(LogLevel::kError, rank, text); });
  }

  mutable std::mutex mutex_;
  std::map<hvd::Controller*, std::shared_ptr<Session>> sessions_;
  std::map<hvd::HorovodGlobalState*, bool> states_;  // with waits_are_told
  Engine::Thresholds thresholds_;
};

Registry& Sessions() {
  static auto* registry = new Registry;  // Horovod's thread may outlive static objects
  return *registry;
}

// --- Attached libraries

using EnqueueAllreduce = hvd::Status (*)(std::shared_ptr<hvd::OpContext>, std::shared_ptr<hvd::Tensor>,
                                         std::shared_ptr<hvd::Tensor>, hvd::ReadyEventList, std::string, const int,
                                         hvd::StatusCallback, hvd::ReduceOp, double, double, std::int32_t);

struct Attached {
  EnqueueAllreduce enqueue = nullptr;
  int (*is_initialized)() = nullptr;
  bool waits_are_told = false;
  std::atomic<hvd::HorovodGlobalState*> state{nullptr};  // set by the first handshake; its address never changes
  std::atomic<int> generation{0};                        // changes with each initialisation
  std::shared_ptr<recording::Recorder> recorder;         // of the last generation that shook hands; under the lock
};

// Guards the map; its elements are never removed. A thread that holds it never waits for anything, and never takes the
// interpreter's lock.
std::mutex attached_mutex;
std::map<std::string, Attached>& AttachedLibraries() {
  static auto* libraries = new std::map<std::string, Attached>;
  return *libraries;
}

// Returns null if this library has not been attached.
Attached* FindAttached(const std::string& library_path) {
  std::lock_guard<std::mutex> lock(attached_mutex);
  const auto it = AttachedLibraries().find(library_path);
  return it == AttachedLibraries().end() ? nullptr : &it->second;
}

// Called by the hook of each new controller. Every initialisation makes one while Horovod still says that it is not
// initialised, so the number grows. Process sets that are added afterwards do not change it. A Horovod that is down may
// also count the initialisation of another Horovod in this process.
void CountGeneration() {
  std::lock_guard<std::mutex> lock(attached_mutex);
  for (auto& [path, attached] : AttachedLibraries())
    if (attached.is_initialized() == 0) ++attached.generation;
}

// --- Hooks
// All on Horovod's background thread.

// The functions that the hooks have replaced, by virtual table and hook. Two Horovods in one process mostly share the
// tables of the one that was loaded first. If each has its own tables, the hooks are in both.
std::mutex originals_mutex;  // guards the map
std::map<std::pair<const void*, const void*>, void*>& Originals() {
  // It is never destroyed, since Horovod's thread outlives main.
  static auto* originals = new std::map<std::pair<const void*, const void*>, void*>;
  return *originals;
}

// Returns the function that this hook has replaced for the object's class.
template <class Function, class Object>
Function* OriginalOf(Function* hook, const Object* object) {
  const void* table = *reinterpret_cast<const void* const*>(object);
  std::lock_guard<std::mutex> lock(originals_mutex);
  return reinterpret_cast<Function*>(Originals().at({table, reinterpret_cast<const void*>(hook)}));
}

void DoInitialization(hvd::Controller* controller) {
  OriginalOf(&DoInitialization, controller)(controller);
  CountGeneration();
  Sessions().Begin(*controller);
}

void CrossRankBitwiseAnd(hvd::Controller* controller, std::vector<long long>& bits, int count) {
  const auto session = Sessions().FindForHook(*controller);
  if (session != nullptr) session->EndIfBroken();
  if (session != nullptr) session->Tick(bits);
  OriginalOf(&CrossRankBitwiseAnd, controller)(controller, bits, count);
  if (session != nullptr) session->AfterTick(bits);
}

void SendReadyTensors(hvd::Controller* controller, hvd::RequestList& requests) {
  const auto session = Sessions().FindForHook(*controller);
  if (session != nullptr) session->EndIfBroken();
  if (session != nullptr) session->BeforeSendReady(requests);
  OriginalOf(&SendReadyTensors, controller)(controller, requests);
}

void RecvReadyTensors(hvd::Controller* controller, std::vector<std::string>& ready_to_reduce,
                      std::vector<hvd::RequestList>& ready) {
  const auto session = Sessions().FindForHook(*controller);
  if (session != nullptr) session->EndIfBroken();
  OriginalOf(&RecvReadyTensors, controller)(controller, ready_to_reduce, ready);
  if (session != nullptr) session->AfterRecvReady(ready_to_reduce, ready);
}

void SendFinalTensors(hvd::Controller* controller, hvd::ResponseList& responses) {
  const auto session = Sessions().FindForHook(*controller);
  if (session != nullptr) session->BeforeSendFinal(responses);
  OriginalOf(&SendFinalTensors, controller)(controller, responses);
  if (session != nullptr) session->AfterSendFinal(responses);
}

void RecvFinalTensors(hvd::Controller* controller, hvd::ResponseList& responses) {
  OriginalOf(&RecvFinalTensors, controller)(controller, responses);
  if (const auto session = Sessions().FindForHook(*controller)) session->AfterRecvFinal(responses);
}

// The context of the handshake's allreduce. Execute writes into it where Horovod's state is.
class HandshakeContext final : public BucketContext {
 public:
  explicit HandshakeContext(bool waits_told) : BucketContext(Memory::Host()), waits_are_told(waits_told) {}

  const bool waits_are_told;
  std::atomic<hvd::HorovodGlobalState*> state{nullptr};
};

template <Carrier carrier>
hvd::Status Execute(hvd::AllreduceOp* operation, std::vector<hvd::TensorTableEntry>& entries,
                    const hvd::Response& response) {
  for (const auto& entry : entries) {
    if (auto* handshake = dynamic_cast<HandshakeContext*>(entry.context.get())) {
      handshake->state = static_cast<AllreduceAccess*>(operation)->global_state_;
      // All ranks come here in the same cycle. So each rank understands the others' messages from the next cycle on.
      hvd::HorovodGlobalState& state = *handshake->state;
      Sessions().Add(state, handshake->waits_are_told);
      for (const std::int32_t id : state.process_set_table.Ids())
        Sessions().FindForHook(*state.process_set_table.Get(id).controller);
    }
  }
  const auto original = OriginalOf(&Execute<carrier>, operation);
  const auto reduce = [&](const hvd::Response& what) { return original(operation, entries, what); };
  if (entries.empty()) return reduce(response);
  hvd::HorovodGlobalState& state = *static_cast<AllreduceAccess*>(operation)->global_state_;
  const auto session = Sessions().Find(*state.process_set_table.Get(entries[0].process_set_id).controller);
  constexpr bool kBreaks = carrier == Carrier::kGloo;
  if (session != nullptr) session->EndIfBroken();  // if it throws, Horovod fails these entries
  try {
    const bool knows = session != nullptr && session->ready();
    return knows ? session->Execute(entries, response, carrier, reduce) : reduce(response);
  } catch (const std::runtime_error& error) {  // Gloo's own errors; bad input is a logic error
    if (kBreaks && session != nullptr) session->Break(error.what());
    throw;
  }
}

// --- Slots

// The mangled names of functions with strings depend on the string ABI of the framework.
#if _GLIBCXX_USE_CXX11_ABI
constexpr char kRecvReadyTensors[] =
    "16RecvReadyTensorsERSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS8_EE"
    "RS2_INS0_11RequestListESaISC_EE";
constexpr char kEnqueueTensorAllreduce[] =
    "_ZN7horovod6common22EnqueueTensorAllreduceESt10shared_ptrINS0_9OpContextEES1_INS0_6TensorEES5_NS0_"
    "14ReadyEventListENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEiSt8functionIFvRKNS0_6StatusEEENS0_"
    "8ReduceOpEddi";
#else
constexpr char kRecvReadyTensors[] = "16RecvReadyTensorsERSt6vectorISsSaISsEERS2_INS0_11RequestListESaIS6_EE";
constexpr char kEnqueueTensorAllreduce[] =
    "_ZN7horovod6common22EnqueueTensorAllreduceESt10shared_ptrINS0_9OpContextEES1_INS0_6TensorEES5_NS0_"
    "14ReadyEventListESsiSt8functionIFvRKNS0_6StatusEEENS0_8ReduceOpEddi";
#endif

// A hook, and the slot that it is going to fill.
struct Prepared {
  Slot slot;
  void* hook;
};

template <class Function>
Prepared Prepare(const Library& library, const std::string& class_name, const std::string& method, Function* hook) {
  void* const address = reinterpret_cast<void*>(hook);
  return {Slot(library, class_name, method, address), address};
}

void PrepareController(std::vector<Prepared>& prepared, const Library& library, const std::string& name) {
  const auto prepare = [&](const std::string& method, auto* hook) {
    prepared.push_back(Prepare(library, name, method, hook));
  };
  prepare("16DoInitializationEv", &DoInitialization);
  prepare("19CrossRankBitwiseAndERSt6vectorIxSaIxEEi", &CrossRankBitwiseAnd);
  prepare("16SendReadyTensorsERNS0_11RequestListE", &SendReadyTensors);
  prepare(kRecvReadyTensors, &RecvReadyTensors);
  prepare("16SendFinalTensorsERNS0_12ResponseListE", &SendFinalTensors);
  prepare("16RecvFinalTensorsERNS0_12ResponseListE", &RecvFinalTensors);
}

template <Carrier carrier>
void PrepareOperation(std::vector<Prepared>& prepared, const Library& library, const std::string& name) {
  prepared.push_back(
      Prepare(library, name, "7ExecuteERSt6vectorINS0_16TensorTableEntryESaIS3_EERKNS0_8ResponseE", &Execute<carrier>));
}

// --- Handshakes

// One thread at a time shakes hands. It may take the interpreter's lock meanwhile, so a thread that waits for this
// mutex must not hold the interpreter's lock.
std::timed_mutex handshake_mutex;

// Raise this number when the messages between ranks change, except for the fields of a policy: Fingerprint sees those.
constexpr std::int64_t kMessages = 8;

// Returns a number for the format of our messages. It must be the same on all ranks, and the handshake adds it up to
// check that.
std::int64_t Fingerprint() { return kMessages + (std::int64_t{Format::Of<Declaration>()} << 8); }

constexpr std::size_t kLongestWhat = 200;  // bytes of the text that tells other ranks what this one waits for

constexpr auto kPollInterval = std::chrono::milliseconds(100);  // between two checks for Ctrl-C in a wait

// Returns the sums of numbers over all ranks, by an ordinary allreduce of Horovod's. Blocks until it is done. All ranks
// give the same count of numbers.
std::vector<std::int64_t> SumOverRanks(const Attached& attached, const std::string& name,
                                       std::vector<std::int64_t> values, std::shared_ptr<hvd::OpContext> context) {
  struct Result {
    std::mutex mutex;
    std::condition_variable done;
    bool finished = false;
    std::string error;
    std::vector<std::int64_t> values;
  };
  const auto result = std::make_shared<Result>();
  result->values = std::move(values);
  const auto count = static_cast<std::int64_t>(result->values.size());
  const auto tensor =
      std::make_shared<TensorView>(result->values.data(), hvd::HOROVOD_INT64, std::vector<std::int64_t>{count},
                                   count * static_cast<std::int64_t>(sizeof(std::int64_t)));
  const auto callback = [result](const hvd::Status& status) {
    std::lock_guard<std::mutex> lock(result->mutex);
    result->finished = true;
    if (!status.ok()) result->error = status.reason();
    result->done.notify_all();
  };
  const hvd::Status status = attached.enqueue(context, tensor, tensor, hvd::ReadyEventList(), name, CPU_DEVICE_ID,
                                              callback, hvd::ReduceOp::SUM, 1.0, 1.0, 0);
  if (!status.ok()) throw EngineError(status.reason());
  std::unique_lock<std::mutex> lock(result->mutex);
  while (!result->done.wait_for(lock, kPollInterval, [&] { return result->finished; })) {
    lock.unlock();
    Session::CheckInterrupt();
    lock.lock();
  }
  if (!result->error.empty()) throw EngineError(result->error);
  return result->values;
}

std::int64_t UnixMilliseconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

// The result of a handshake.
struct Handshake {
  hvd::HorovodGlobalState* state;
  std::int64_t run;  // the mean of all ranks' clocks, in milliseconds of Unix time
};

Handshake ShakeHands(const Attached& attached) {
  const auto context = std::make_shared<HandshakeContext>(attached.waits_are_told);
  const auto sums = SumOverRanks(attached, AgreementName("handshake"), {1, Fingerprint(), UnixMilliseconds()}, context);
  if (sums[1] != sums[0] * Fingerprint())
    throw AttachError("the ranks run different versions of horovod-partial; install the same one everywhere");
  if (context->state == nullptr)
    throw AttachError(
        "Horovod reduced the handshake with an operation that horovod-partial does not know; "
        "set HOROVOD_CPU_OPERATIONS to MPI or GLOO");
  return {context->state, sums[2] / sums[0]};
}

std::shared_ptr<Session> Lookup(const Attached& attached, std::int32_t process_set_id) {
  hvd::HorovodGlobalState* const state = attached.state;
  if (state == nullptr || attached.is_initialized() == 0) return nullptr;
  if (!state->process_set_table.Contains(process_set_id)) return nullptr;
  return Sessions().Find(*state->process_set_table.Get(process_set_id).controller);
}

// Returns the session of all ranks if this generation of Horovod has shaken hands, else null.
std::shared_ptr<Session> FindIntroduced(const Attached& attached) {
  const auto global = Lookup(attached, 0);
  return global != nullptr && global->handshaken ? global : nullptr;
}

// Shakes hands, unless another thread has done so while this one waited for its turn.
std::shared_ptr<Session> Introduce(Attached& attached) {
  std::unique_lock<std::timed_mutex> turn(handshake_mutex, std::defer_lock);
  while (!turn.try_lock_for(kPollInterval)) Session::CheckInterrupt();
  if (auto introduced = FindIntroduced(attached)) return introduced;
  const Handshake handshake = ShakeHands(attached);
  attached.state = handshake.state;
  auto global = Lookup(attached, 0);
  if (global == nullptr)
    throw AttachError("Horovod was initialised before horovod_partial was imported; import horovod_partial first");
  const std::string missing = global->MissingHooks();
  if (!missing.empty())
    throw AttachError("the hooks " + missing + " did not run on rank " + std::to_string(global->engine().rank()) +
                      "; is another plugin attached to this Horovod?");
  global->recorder()->SetRun(handshake.run);
  auto recorder = global->recorder();
  {
    std::lock_guard<std::mutex> lock(attached_mutex);
    attached.recorder.swap(recorder);  // the old one ends, and writes, after the lock is released
  }
  global->handshaken = true;
  return global;
}

// Returns the recorder of the last generation that has shaken hands, also if that is down now; null if none has.
std::shared_ptr<recording::Recorder> LastRecorder(const std::string& library_path) {
  std::lock_guard<std::mutex> lock(attached_mutex);
  const auto it = AttachedLibraries().find(library_path);
  return it == AttachedLibraries().end() ? nullptr : it->second.recorder;
}

}  // namespace

void Attach(const std::string& library_path, bool waits_are_told) {
  std::lock_guard<std::mutex> lock(attached_mutex);
  auto& libraries = AttachedLibraries();
  if (libraries.count(library_path) > 0) return;
  const Library library(library_path);
  const auto enqueue = reinterpret_cast<EnqueueAllreduce>(library.Symbol(kEnqueueTensorAllreduce));
  const auto is_initialized = reinterpret_cast<int (*)()>(library.Symbol("horovod_is_initialized"));
  std::vector<Prepared> prepared;
#if HAVE_GLOO
  PrepareController(prepared, library, "GlooController");
  PrepareOperation<Carrier::kGloo>(prepared, library, "GlooAllreduce");
#endif
#if HAVE_MPI
  PrepareController(prepared, library, "MPIController");
  PrepareOperation<Carrier::kMpi>(prepared, library, "MPIAllreduce");
#endif
#if HAVE_NCCL
  PrepareOperation<Carrier::kNccl>(prepared, library, "NCCLAllreduce");  // carries data only, and has no controller
#endif
  for (const auto& [slot, hook] : prepared) slot.MakeWritable();
  {
    std::lock_guard<std::mutex> originals_lock(originals_mutex);
    for (const auto& [slot, hook] : prepared) Originals()[{slot.table(), hook}] = slot.original();
  }
  for (const auto& [slot, hook] : prepared) slot.Set(hook);  // no slot has been changed before, and no more can fail
  for (const auto& [slot, hook] : prepared) slot.Seal();
  Attached& attached = libraries[library_path];
  attached.enqueue = enqueue;
  attached.waits_are_told = waits_are_told;
  attached.is_initialized = is_initialized;
}

std::shared_ptr<Session> SessionOf(const std::string& library_path, std::int32_t process_set_id) {
  Attached* const attached = FindAttached(library_path);
  if (attached == nullptr) throw AttachError("not attached to " + library_path);
  if (attached->is_initialized() == 0) throw EngineError(hvd::NOT_INITIALIZED_ERROR.reason());
  auto global = FindIntroduced(*attached);
  if (global == nullptr) global = Introduce(*attached);
  if (process_set_id == 0) return global;
  if (!attached->state.load()->process_set_table.Contains(process_set_id)) {
    if (!global->Alive()) global->engine().ThrowShutDown();  // when Horovod shuts down, its process sets go too
    throw std::invalid_argument("process set " + std::to_string(process_set_id) + " does not exist");
  }
  const auto session = Lookup(*attached, process_set_id);
  if (session == nullptr)
    throw std::invalid_argument("this rank is not in process set " + std::to_string(process_set_id));
  // A process set that was added later learns its state in its first cycle.
  while (!session->ready()) {
    if (!global->Alive()) global->engine().ThrowShutDown();
    Session::CheckInterrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return session;
}

std::vector<std::string> Gather(const std::string& library_path, const std::string& text) {
  const auto session = SessionOf(library_path, 0);
  const Engine& engine = session->engine();
  const auto sum = [&](const std::string& name, std::vector<std::int64_t> values) {
    const auto context = std::make_shared<BucketContext>(Memory::Host());
    return SumOverRanks(*FindAttached(library_path), AgreementName("gather." + name), std::move(values), context);
  };
  // Each rank fills its own part of a row of numbers, and the other parts are 0. The sum over all ranks is the whole
  // row. A sum is Horovod's simplest operation.
  const auto own = static_cast<std::size_t>(engine.rank());
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(engine.size()));
  lengths[own] = static_cast<std::int64_t>(text.size());
  lengths = sum("lengths", std::move(lengths));
  const auto begin_of = [&](std::size_t rank) {
    return std::accumulate(lengths.begin(), lengths.begin() + static_cast<std::ptrdiff_t>(rank), std::ptrdiff_t{0});
  };
  std::vector<std::int64_t> characters(static_cast<std::size_t>(begin_of(lengths.size())));
  std::copy(text.begin(), text.end(), characters.begin() + begin_of(own));
  if (!characters.empty()) characters = sum("text", std::move(characters));
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    const auto begin = characters.begin() + begin_of(rank);
    texts.emplace_back(begin, begin + lengths[rank]);
  }
  return texts;
}

std::shared_ptr<Session> FindSession(const std::string& library_path, std::int32_t process_set_id) {
  Attached* const attached = FindAttached(library_path);
  return attached == nullptr || FindIntroduced(*attached) == nullptr ? nullptr : Lookup(*attached, process_set_id);
}

int Generation(const std::string& library_path) {
  const Attached* const attached = FindAttached(library_path);
  return attached == nullptr || attached->is_initialized() == 0 ? 0 : attached->generation.load();
}

void Record(const std::string& library_path, const std::string& directory, std::size_t most_bytes) {
  SessionOf(library_path, 0)->recorder()->Begin(directory, most_bytes);
}

void RecordWait(const std::string& library_path, Time begin, Time end) {
  if (const auto recorder = LastRecorder(library_path)) recorder->WaitedForHorovod(begin, end);
}

void EndRecording(const std::string& library_path) {
  if (const auto recorder = LastRecorder(library_path)) recorder->End();
}

// A wait of ours is known exactly. Of Horovod's own collectives it is only known that one is outstanding, not whether a
// thread waits for it.
Look LookAtThisRank() {
  using Kind = Activity::Kind;
  const auto sessions = Sessions().Ready();
  const PossibleArrivals::Wait wait = PossibleArrivalsOfProcess()->LongestWait();
  Look look;
  Activity& activity = look.activity;
  for (const auto& session : sessions) {
    look.cycles += session->cycles();
    if (wait.since != kNever && !wait.ends) {
      if (&session->engine() != wait.engine) continue;
      activity = {Kind::kWaiting, wait.what, session->members()};
      look.number = static_cast<std::uint64_t>(wait.since.count());
    } else if (const std::string foreign = session->FindForeign(); wait.ends || foreign == JOIN_TENSOR_NAME) {
      activity = {Kind::kResting, wait.ends ? wait.what : "a join", {}};
      look.number = 0;
    } else if (!foreign.empty() && activity.kind == Kind::kComputing) {
      activity = {Kind::kWaiting, "Horovod's " + foreign, session->members()};
      look.number = session->foreign_changes();
    }
  }
  activity.what.resize(std::min(activity.what.size(), kLongestWhat));
  return look;
}

void SetThresholds(const Engine::Thresholds& thresholds) { Sessions().SetThresholds(thresholds); }

}  // namespace horovod_partial::attach
