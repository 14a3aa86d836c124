#include "attach/attachment.h"

#include <algorithm>
#include <numeric>
#include <thread>

#include "attach/envelope.h"
#include "attach/handshake.h"
#include "attach/sessions.h"

namespace horovod_partial::attach {
namespace {

constexpr std::size_t kLongestWhat = 200;  // the most bytes of the text that says what this rank waits for

}  // namespace

std::shared_ptr<Session> SessionOf(Attached& library, std::int32_t process_set_id) {
  if (library.is_initialized() == 0) throw EngineError(hvd::NOT_INITIALIZED_ERROR.reason());
  auto global = FindIntroduced(library);
  if (global == nullptr) global = Introduce(library);
  if (process_set_id == 0) return global;
  if (!library.state.load()->process_set_table.Contains(process_set_id)) {
    if (!global->Alive()) global->engine().ThrowShutDown();  // the process set is gone because Horovod has shut down
    throw std::invalid_argument("process set " + std::to_string(process_set_id) + " does not exist");
  }
  const auto session = Lookup(library, process_set_id);
  if (session == nullptr)
    throw std::invalid_argument("this rank is not in process set " + std::to_string(process_set_id));
  // The session of a process set that was added after the handshake is ready in the set's first cycle. Wait for that.
  while (!session->ready()) {
    if (!global->Alive()) global->engine().ThrowShutDown();
    Session::CheckInterrupt();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return session;
}

std::vector<std::string> Gather(Attached& library, const std::string& text) {
  const auto session = SessionOf(library, 0);
  const Engine& engine = session->engine();
  const auto sum = [&](const std::string& name, std::vector<std::int64_t> values) {
    const auto context = std::make_shared<BucketContext>(Memory::Host());
    return SumOverRanks(library, AgreementName("gather." + name), std::move(values), context);
  };
  // Texts are gathered by sums, because a sum is Horovod's simplest operation. Each rank fills its own part of a row of
  // numbers and leaves the other parts 0. The sum over all ranks is the whole row.
  const auto own = Index(engine.rank());
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

std::shared_ptr<Session> FindSession(const Attached& library, std::int32_t process_set_id) {
  return FindIntroduced(library) == nullptr ? nullptr : Lookup(library, process_set_id);
}

std::shared_ptr<Session> ReadySession(const Attached& library, std::int32_t process_set_id) {
  for (const auto& session : SessionsOfProcess().Ready())
    if (session->Serves(library.state, process_set_id)) return session;
  return nullptr;
}

int Generation(const Attached& library) { return library.is_initialized() == 0 ? 0 : library.generation.load(); }

// If a thread waits for a round or in a flush, reports this wait, which is known exactly. Otherwise reports an
// outstanding collective of Horovod's own, though a thread need not wait for that collective.
Look LookAtThisRank() {
  using Kind = Activity::Kind;
  const auto sessions = SessionsOfProcess().Ready();
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

std::optional<StepReport> TakeStepsOfThisRank() {
  for (const auto& session : SessionsOfProcess().Ready()) {
    const auto& recorder = session->recorder();  // all process sets share one recorder until Horovod shuts down
    if (recorder != nullptr && recorder->watches()) return recorder->TakeSteps();
  }
  return std::nullopt;
}

}  // namespace horovod_partial::attach
