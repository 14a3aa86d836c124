#include "attach/hooks.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attach/attached.h"
#include "attach/handshake.h"
#include "attach/sessions.h"

namespace horovod_partial::attach {
namespace {

// The functions of Horovod that hooks have replaced, by virtual table and hook. Two Horovod libraries in one process
// mostly share the tables of the library that was loaded first. If each library has its own, the hooks are in both.
// The map is never freed, because Horovod's thread may outlive main.
auto& originals = *new std::map<std::pair<const void*, const void*>, void*>;
std::mutex originals_mutex;  // guards `originals`; no other lock is taken while it is held

// Returns the function of Horovod that `hook` has replaced in the class of `object`.
template <class Function, class Object>
Function* OriginalOf(Function* hook, const Object* object) {
  const void* table = *reinterpret_cast<const void* const*>(object);
  std::lock_guard<std::mutex> lock(originals_mutex);
  return reinterpret_cast<Function*>(originals.at({table, reinterpret_cast<const void*>(hook)}));
}

// --- Hooks
// All hooks run on Horovod's background thread.

// Returns the session of a controller, or null. Throws if a reduction has failed, because Horovod's loop must then end.
std::shared_ptr<Session> Enter(hvd::Controller& controller) {
  auto session = SessionsOfProcess().FindForHook(controller);
  if (session != nullptr) session->EndIfBroken();
  return session;
}

void DoInitialization(hvd::Controller* controller) {
  OriginalOf(&DoInitialization, controller)(controller);
  CountGeneration();
  SessionsOfProcess().Begin(*controller);
}

void CrossRankBitwiseAnd(hvd::Controller* controller, std::vector<long long>& bits, int count) {
  const auto session = Enter(*controller);
  if (session != nullptr) session->Tick(bits);
  OriginalOf(&CrossRankBitwiseAnd, controller)(controller, bits, count);
  if (session != nullptr) session->AfterTick(bits);
}

void SendReadyTensors(hvd::Controller* controller, hvd::RequestList& requests) {
  const auto session = Enter(*controller);
  if (session != nullptr) session->BeforeSendReady(requests);
  OriginalOf(&SendReadyTensors, controller)(controller, requests);
}

void RecvReadyTensors(hvd::Controller* controller, std::vector<std::string>& ready_to_reduce,
                      std::vector<hvd::RequestList>& ready) {
  const auto session = Enter(*controller);
  OriginalOf(&RecvReadyTensors, controller)(controller, ready_to_reduce, ready);
  if (session != nullptr) session->AfterRecvReady(ready_to_reduce, ready);
}

void SendFinalTensors(hvd::Controller* controller, hvd::ResponseList& responses) {
  const auto session = SessionsOfProcess().FindForHook(*controller);
  if (session != nullptr) session->BeforeSendFinal(responses);
  OriginalOf(&SendFinalTensors, controller)(controller, responses);
  if (session != nullptr) session->AfterFinal(responses);
}

void RecvFinalTensors(hvd::Controller* controller, hvd::ResponseList& responses) {
  OriginalOf(&RecvFinalTensors, controller)(controller, responses);
  if (const auto session = SessionsOfProcess().FindForHook(*controller)) session->AfterFinal(responses);
}

template <Carrier carrier>
hvd::Status Execute(hvd::AllreduceOp* operation, std::vector<hvd::TensorTableEntry>& entries,
                    const hvd::Response& response) {
  const auto original = OriginalOf(&Execute<carrier>, operation);
  const auto reduce = [&](const hvd::Response& what) { return original(operation, entries, what); };
  if (entries.empty()) return reduce(response);
  hvd::HorovodGlobalState& state = *static_cast<AllreduceAccess*>(operation)->global_state_;
  const auto session = SessionsOfProcess().Find(*state.process_set_table.Get(entries[0].process_set_id).controller);
  constexpr bool kBreaks = carrier == Carrier::kGloo;
  if (session != nullptr) session->EndIfBroken();  // if EndIfBroken throws, Horovod fails the tensors with this error
  try {
    const bool knows = session != nullptr && session->ready();
    hvd::Status status = knows ? session->Execute(*operation, entries, response, carrier, reduce) : reduce(response);
    for (const auto& entry : entries)
      if (auto* handshake = dynamic_cast<HandshakeContext*>(entry.context.get()); handshake != nullptr && status.ok())
        handshake->Ended(state, static_cast<const std::int64_t*>(entry.output->data()));
    return status;
  } catch (const std::runtime_error& error) {  // Gloo throws this type; for bad input it throws std::logic_error
    if (kBreaks && session != nullptr) session->Break(error.what());
    throw;
  }
}

// --- Functions that find the slots for the hooks in Horovod's virtual tables

// The mangled name of a function that takes std::string depends on the string ABI of the framework.
#if _GLIBCXX_USE_CXX11_ABI
constexpr char kRecvReadyTensors[] =
    "16RecvReadyTensorsERSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS8_EE"
    "RS2_INS0_11RequestListESaISC_EE";
#else
constexpr char kRecvReadyTensors[] = "16RecvReadyTensorsERSt6vectorISsSaISsEERS2_INS0_11RequestListESaIS6_EE";
#endif

void FindController(std::vector<Slot>& slots, const Library& library, const std::string& name) {
  const auto find = [&](const std::string& method, auto* hook) {
    slots.emplace_back(library, name, method, reinterpret_cast<void*>(hook));
  };
  find("16DoInitializationEv", &DoInitialization);
  find("19CrossRankBitwiseAndERSt6vectorIxSaIxEEi", &CrossRankBitwiseAnd);
  find("16SendReadyTensorsERNS0_11RequestListE", &SendReadyTensors);
  find(kRecvReadyTensors, &RecvReadyTensors);
  find("16SendFinalTensorsERNS0_12ResponseListE", &SendFinalTensors);
  find("16RecvFinalTensorsERNS0_12ResponseListE", &RecvFinalTensors);
}

template <Carrier carrier>
void FindOperation(std::vector<Slot>& slots, const Library& library, const std::string& name) {
  slots.emplace_back(library, name, "7ExecuteERSt6vectorINS0_16TensorTableEntryESaIS3_EERKNS0_8ResponseE",
                     reinterpret_cast<void*>(&Execute<carrier>));
}

}  // namespace

void InstallHooks(const Library& library) {
  std::vector<Slot> slots;
#if HAVE_GLOO
  FindController(slots, library, "GlooController");
  FindOperation<Carrier::kGloo>(slots, library, "GlooAllreduce");
#endif
#if HAVE_MPI
  FindController(slots, library, "MPIController");
  FindOperation<Carrier::kMpi>(slots, library, "MPIAllreduce");
#endif
#if HAVE_NCCL
  FindOperation<Carrier::kNccl>(slots, library, "NCCLAllreduce");  // Horovod has no controller for NCCL
#endif
  for (const Slot& slot : slots) slot.MakeWritable();
  {
    std::lock_guard<std::mutex> lock(originals_mutex);
    for (const Slot& slot : slots) originals[{slot.table(), slot.hook()}] = slot.original();
  }
  for (const Slot& slot : slots) slot.Set();  // changes the tables, after everything that can fail
  for (const Slot& slot : slots) slot.Seal();
}

}  // namespace horovod_partial::attach
