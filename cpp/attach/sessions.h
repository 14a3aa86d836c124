// The sessions of this process, by controller.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "attach/session.h"

namespace horovod_partial::attach {

class Sessions {
 public:
  // Horovod initialises a controller: the session before it is over, and another one begins.
  void Begin(hvd::Controller& controller);
  // Any thread: null if the controller has no session, or is gone.
  std::shared_ptr<Session> Find(hvd::Controller& controller) const;
  // For hooks, on Horovod's thread only. A process set that was added after the handshake of its generation gets its
  // state here. The lock is not held while Horovod's table of process sets is used, because Horovod calls
  // DoInitialization with that table locked.
  std::shared_ptr<Session> FindForHook(hvd::Controller& controller) const;
  // On Horovod's thread: all ranks have shaken hands. Gives the sessions of this generation their state, without which
  // the hooks do nothing. Every later generation has it at the same address. `waits_are_told`:
  // PossibleArrivals::Foreign::told.
  void Introduce(hvd::HorovodGlobalState& state, bool waits_are_told);
  // Any thread: those that have their state.
  std::vector<std::shared_ptr<Session>> Ready() const;
  // Sets the thresholds of all sessions that begin from now on.
  void SetThresholds(const Engine::Thresholds& thresholds);

 private:
  friend Sessions& SessionsOfProcess();
  Sessions() = default;  // a process has one such object only

  mutable std::mutex mutex_;  // guards what follows; both threads take it
  std::map<hvd::Controller*, std::shared_ptr<Session>> sessions_;
  std::map<hvd::HorovodGlobalState*, bool> states_;  // of libraries that have shaken hands, with waits_are_told
  Engine::Thresholds thresholds_;
};

Sessions& SessionsOfProcess();

}  // namespace horovod_partial::attach
