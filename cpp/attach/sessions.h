// The sessions of this process: one for each controller of Horovod.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "attach/session.h"

namespace horovod_partial::attach {

class Sessions {
 public:
  // Called when Horovod initialises a controller. Ends the controller's earlier session, and begins a new one.
  void Begin(hvd::Controller& controller);
  // Returns the session of a controller, or null if the controller has none or is gone. Any thread may call this.
  std::shared_ptr<Session> Find(hvd::Controller& controller) const;
  // Finds the session of a controller, for hooks on Horovod's thread. Gives Horovod's state to the session, if its
  // process set was added after the handshake. Does not hold `mutex_` while it uses Horovod's table of process sets:
  // Horovod locks this table when it calls DoInitialization, and our hook of DoInitialization locks `mutex_`.
  std::shared_ptr<Session> FindForHook(hvd::Controller& controller) const;
  // Called on Horovod's thread when the handshake has succeeded. Gives Horovod's state to the sessions, so that their
  // hooks begin to work. The state has the same address after each hvd.init(). `waits_are_told`: true if Python code
  // reports which threads wait for Horovod's own collectives.
  void Introduce(hvd::HorovodGlobalState& state, bool waits_are_told);
  // Returns the sessions that have been given Horovod's state. Any thread may call this.
  std::vector<std::shared_ptr<Session>> Ready() const;
  // Sets the thresholds of all sessions that begin from now on.
  void SetThresholds(const Engine::Thresholds& thresholds) {
    std::lock_guard<std::mutex> lock(mutex_);
    thresholds_ = thresholds;
  }

 private:
  mutable std::mutex mutex_;  // guards `sessions_`, `states_` and `thresholds_`
  std::map<hvd::Controller*, std::shared_ptr<Session>> sessions_;
  std::map<hvd::HorovodGlobalState*, bool> states_;  // for each Horovod that had a handshake: `waits_are_told`
  Engine::Thresholds thresholds_;
};

Sessions& SessionsOfProcess();

}  // namespace horovod_partial::attach
