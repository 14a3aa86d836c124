// The sessions of this process, by controller.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "attach/session.h"
#include "engine/log.h"
#include "recording/recorder.h"

namespace horovod_partial::attach {

class Sessions {
 public:
  // Horovod initialises a controller: the session before it is over, and another one begins.
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
  // Any thread: null if the controller has no session, or is gone.
  std::shared_ptr<Session> Find(hvd::Controller& controller) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = sessions_.find(&controller);
    return it == sessions_.end() || it->second->ControllerIsGone() ? nullptr : it->second;
  }
  // For hooks, on Horovod's thread only. A process set that was added after the handshake of its generation gets its
  // state here. The lock is not held while Horovod's table of process sets is used, because Horovod calls
  // DoInitialization with that table locked.
  std::shared_ptr<Session> FindForHook(hvd::Controller& controller) const {
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
  // On Horovod's thread: all ranks have shaken hands. Gives the sessions of this generation their state, without which
  // the hooks do nothing. Every later generation has it at the same address. `waits_are_told`:
  // PossibleArrivals::Foreign::told.
  void Introduce(hvd::HorovodGlobalState& state, bool waits_are_told) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      states_.emplace(&state, waits_are_told);
    }
    const auto global = Find(*state.process_set_table.Get(0).controller);
    if (global == nullptr || global->ready()) return;  // null: it was initialised before the hooks were there
    const Engine& engine = global->engine();
    const auto recorder = std::make_shared<recording::Recorder>(
        recording::Recorder::Origin{engine.rank(), engine.size()},
        [rank = engine.rank()](const std::string& text) { Log(LogLevel::kError, rank, text); });
    global->SetState(state, 0, recorder, waits_are_told);
    for (const std::int32_t id : state.process_set_table.Ids())
      FindForHook(*state.process_set_table.Get(id).controller);
  }
  // Any thread: those that have their state.
  std::vector<std::shared_ptr<Session>> Ready() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<Session>> ready;
    for (const auto& [controller, session] : sessions_)
      if (session->ready()) ready.push_back(session);
    return ready;
  }
  // Sets the thresholds of all sessions that begin from now on.
  void SetThresholds(const Engine::Thresholds& thresholds) {
    std::lock_guard<std::mutex> lock(mutex_);
    thresholds_ = thresholds;
  }

 private:
  friend Sessions& SessionsOfProcess();
  Sessions() = default;  // a process has one such object only

  mutable std::mutex mutex_;  // guards what follows; both threads take it
  std::map<hvd::Controller*, std::shared_ptr<Session>> sessions_;
  std::map<hvd::HorovodGlobalState*, bool> states_;  // of libraries that have shaken hands, with waits_are_told
  Engine::Thresholds thresholds_;
};

inline Sessions& SessionsOfProcess() {
  static auto* sessions = new Sessions;  // Horovod's thread may outlive static objects
  return *sessions;
}

}  // namespace horovod_partial::attach
