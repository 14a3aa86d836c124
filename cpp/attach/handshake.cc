#include "attach/handshake.h"

#include <chrono>
#include <future>
#include <mutex>
#include <utility>

#include "attach/envelope.h"
#include "attach/library.h"
#include "attach/sessions.h"
#include "core/rounds/declaration.h"
#include "core/values/bytes.h"
#include "recording/recorder.h"

namespace horovod_partial::attach {
namespace {

// Lets one thread at a time run the handshake. That thread may take the lock of Python's interpreter, so a thread that
// waits for this mutex must not hold the interpreter's lock.
std::timed_mutex handshake_mutex;

// Raise this number when messages between ranks change. If only Declaration changes, Fingerprint changes by itself.
constexpr std::int64_t kMessages = 10;

// Returns a number for the format of our messages. In the handshake Horovod sums this number over all ranks. Each rank
// compares the sum with its own number times the number of ranks. Both are equal if all ranks have the same number.
std::int64_t Fingerprint() { return kMessages + (std::int64_t{Format::Of<Declaration>()} << 8); }

std::int64_t UnixMilliseconds() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

constexpr auto kPollInterval = std::chrono::milliseconds(100);  // how often a wait checks for Ctrl-C

// The indices of the numbers that a handshake adds up over all ranks.
enum : std::size_t { kRanks, kFingerprints, kMilliseconds };

bool Agree(const std::int64_t* sums) { return sums[kFingerprints] == sums[kRanks] * Fingerprint(); }

}  // namespace

void HandshakeContext::Ended(hvd::HorovodGlobalState& state, const std::int64_t* sums) {
  if (Agree(sums)) SessionsOfProcess().Introduce(state, waits_are_told_);
  state_ = &state;
}

std::vector<std::int64_t> SumOverRanks(const Attached& attached, const std::string& name,
                                       std::vector<std::int64_t> values, std::shared_ptr<hvd::OpContext> context) {
  struct Outcome {
    std::vector<std::int64_t> values;
    std::promise<hvd::Status> status;
  };
  const auto result = std::make_shared<Outcome>();
  result->values = std::move(values);
  const auto count = static_cast<std::int64_t>(result->values.size());
  const auto tensor =
      std::make_shared<TensorView>(result->values.data(), hvd::HOROVOD_INT64, std::vector<std::int64_t>{count},
                                   count * static_cast<std::int64_t>(sizeof(std::int64_t)));
  const auto callback = [result](const hvd::Status& status) { result->status.set_value(status); };
  hvd::Status status = attached.enqueue(context, tensor, tensor, hvd::ReadyEventList(), name, CPU_DEVICE_ID, callback,
                                        hvd::ReduceOp::SUM, 1.0, 1.0, 0);
  if (status.ok()) {
    std::future<hvd::Status> ended = result->status.get_future();
    while (ended.wait_for(kPollInterval) != std::future_status::ready) Session::CheckInterrupt();
    status = ended.get();
  }
  if (!status.ok()) throw EngineError(status.reason());
  return result->values;
}

std::shared_ptr<Session> Lookup(const Attached& attached, std::int32_t process_set_id) {
  hvd::HorovodGlobalState* const state = attached.state;
  if (state == nullptr || attached.is_initialized() == 0) return nullptr;
  if (!state->process_set_table.Contains(process_set_id)) return nullptr;
  return SessionsOfProcess().Find(*state->process_set_table.Get(process_set_id).controller);
}

std::shared_ptr<Session> FindIntroduced(const Attached& attached) {
  const auto global = Lookup(attached, 0);
  return global != nullptr && global->handshaken ? global : nullptr;
}

std::shared_ptr<Session> Introduce(Attached& attached) {
  std::unique_lock<std::timed_mutex> turn(handshake_mutex, std::defer_lock);
  while (!turn.try_lock_for(kPollInterval)) Session::CheckInterrupt();
  if (auto introduced = FindIntroduced(attached)) return introduced;
  const auto context = std::make_shared<HandshakeContext>(attached.waits_are_told);
  const auto sums = SumOverRanks(attached, AgreementName("handshake"), {1, Fingerprint(), UnixMilliseconds()}, context);
  if (!Agree(sums.data()))
    throw AttachError("the ranks run different versions of horovod-partial; install the same one everywhere");
  if (context->state() == nullptr)
    throw AttachError(
        "Horovod reduced the handshake with an operation that horovod-partial does not know; "
        "set HOROVOD_CPU_OPERATIONS to MPI or GLOO");
  attached.state = context->state();
  auto global = Lookup(attached, 0);
  if (global == nullptr)
    throw AttachError("Horovod was initialised before horovod_partial was imported; import horovod_partial first");
  const std::string missing = global->MissingHooks();
  if (!missing.empty())
    throw AttachError("the hooks " + missing + " did not run on rank " + std::to_string(global->engine().rank()) +
                      "; is another plugin attached to this Horovod?");
  global->recorder()->SetRun(sums[kMilliseconds] / sums[kRanks]);  // the run's number: the mean of all ranks' clocks
  std::atomic_store(&attached.recorder, global->recorder());
  global->handshaken = true;
  return global;
}

}  // namespace horovod_partial::attach
