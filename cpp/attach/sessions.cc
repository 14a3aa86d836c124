#include "attach/sessions.h"

#include <utility>

#include "engine/log.h"
#include "recording/recorder.h"

namespace horovod_partial::attach {

void Sessions::Begin(hvd::Controller& controller) {
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
  for (const auto& session : over) session->Retire();  // `mutex_` is not held, because Retire runs callbacks
}

std::shared_ptr<Session> Sessions::Find(hvd::Controller& controller) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = sessions_.find(&controller);
  return it == sessions_.end() || it->second->ControllerIsGone() ? nullptr : it->second;
}

std::shared_ptr<Session> Sessions::FindForHook(hvd::Controller& controller) const {
  const auto session = Find(controller);
  if (session == nullptr || session->ready()) return session;
  std::map<hvd::HorovodGlobalState*, bool> states;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    states = states_;
  }
  for (const auto& [state, waits_are_told] : states) {
    for (const std::int32_t id : state->process_set_table.Ids()) {
      if (id == 0 || state->process_set_table.Get(id).controller.get() != &controller) continue;
      const auto global = Find(*state->process_set_table.Get(0).controller);
      if (global != nullptr && global->ready()) session->SetState(*state, id, global->recorder(), waits_are_told);
    }
  }
  return session;
}

void Sessions::Introduce(hvd::HorovodGlobalState& state, bool waits_are_told) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    states_.emplace(&state, waits_are_told);
  }
  const auto global = Find(*state.process_set_table.Get(0).controller);
  if (global == nullptr || global->ready()) return;  // no session exists if Horovod was initialised before the hooks
  const Engine& engine = global->engine();
  const auto recorder = std::make_shared<recording::Recorder>(
      engine.rank(), engine.size(),
      [rank = engine.rank()](const std::string& text) { Log(LogLevel::kError, rank, text); });
  global->SetState(state, 0, recorder, waits_are_told);
  for (const std::int32_t id : state.process_set_table.Ids()) FindForHook(*state.process_set_table.Get(id).controller);
}

std::vector<std::shared_ptr<Session>> Sessions::Ready() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Session>> ready;
  for (const auto& [controller, session] : sessions_)
    if (session->ready()) ready.push_back(session);
  return ready;
}

Sessions& SessionsOfProcess() {
  static auto* sessions = new Sessions;  // the object is never freed: Horovod's thread may outlive static objects
  return *sessions;
}

}  // namespace horovod_partial::attach
