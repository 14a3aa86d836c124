// A session: this rank's state for one process set from hvd.init() to hvd.shutdown(). On rank 0 it has the coordinator.
#pragma once

#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attach/coordination.h"
#include "attach/cycle_record.h"
#include "attach/entries.h"
#include "attach/group_communicators.h"
#include "attach/horovod.h"
#include "attach/outstanding.h"
#include "engine/collectives.h"
#include "engine/engine.h"

namespace horovod_partial::attach {

const std::shared_ptr<PossibleArrivals>& PossibleArrivalsOfProcess();

// A session begins when Horovod initialises the controller of a process set. It ends when Horovod shuts down, or is
// initialised anew. Hooks and Place run on Horovod's thread; Alive and Interrupt run on the application's threads.
class Session final : public Collectives, public std::enable_shared_from_this<Session> {
 public:
  Session(hvd::Controller& controller, const Engine::Thresholds& thresholds);

  Engine& engine() { return engine_; }

  // Called when Horovod has been initialised anew. Every wait in this session fails, and nothing new is accepted.
  void Retire();
  // Gives the session Horovod's state, and the recorder that all process sets share. Before this call the hooks only
  // call Horovod's functions, and ranks cannot contribute.
  void SetState(hvd::HorovodGlobalState& state, std::int32_t process_set_id,
                std::shared_ptr<recording::Recorder> recorder, bool waits_are_told);
  // The recorder that all process sets share until Horovod shuts down; null before SetState.
  const std::shared_ptr<recording::Recorder>& recorder() const { return recorder_; }
  bool ready() const { return state_ != nullptr; }
  // True if the session is ready and belongs to this process set of the Horovod with `state`. Any thread may call it.
  bool Serves(const hvd::HorovodGlobalState* state, std::int32_t process_set_id) const {
    return ready() && state_ == state && process_set_id_ == process_set_id && !retired_ && !ControllerIsGone();
  }

  // --- Functions for heartbeats. Any thread may call them once the session is ready
  // The members of the process set: their ranks in the whole job. Empty if all ranks are members.
  const std::vector<Rank>& members() const { return members_; }
  // FindForeign: the name of an outstanding collective of Horovod's own (hvd.allreduce, say), or an empty text.
  // foreign_changes: OutstandingWatch::changes, for all process sets. cycles: a number that each cycle raises.
  std::string FindForeign() { return outstanding_.Find(); }
  std::uint64_t foreign_changes() const { return foreign_.changes(); }
  std::uint64_t cycles() const { return cycles_; }

  std::atomic<bool> handshaken{false};
  // Returns the names of the hooks that should have run on this rank and did not. The handshake fails if there are any.
  std::string MissingHooks() const;
  // Returns what rank 0's coordinator has counted; empty on other ranks.
  Coordination::Statistics StatisticsOfCoordinator() const;

  // --- The hooks call these functions on Horovod's background thread, in the order of a cycle
  void Tick(std::vector<long long>& status_bits);
  // `status_bits`: the status bits of Horovod's cache coordinator, combined over all ranks, so that all have the same.
  void AfterTick(const std::vector<long long>& status_bits);
  void BeforeSendReady(hvd::RequestList& requests);
  void AfterRecvReady(std::vector<std::string>& ready_to_reduce, std::vector<hvd::RequestList>& ready);
  void BeforeSendFinal(hvd::ResponseList& responses);
  // Called when rank 0 has sent the responses, and when another rank has received them.
  void AfterFinal(hvd::ResponseList& responses);
  // Executes a response. `operation` is Horovod's operation, and `reduce` executes a response with it. A round that has
  // groups is reduced in this rank's group.
  hvd::Status Execute(hvd::AllreduceOp& operation, std::vector<hvd::TensorTableEntry>& entries,
                      const hvd::Response& response, Carrier carrier, const Reduce& reduce);
  // Break is called when a reduction over Gloo has failed halfway. Other ranks may still send data of this reduction.
  // If Horovod used the same connections again, Gloo would receive this data and end the process. So after Break,
  // EndIfBroken throws an exception. It is called before each reduction, so this cycle reduces nothing more. The next
  // hook calls it too. There the exception ends Horovod's loop before Horovod communicates. Then the connections
  // close, and all ranks learn of the failure.
  void Break(const std::string& error) { broken_ = error; }
  void EndIfBroken() const;

  // --- Implementation of the interface Collectives
  void Place(const std::shared_ptr<SharedBucket>& bucket, const std::string& name, const BucketConfig& config,
             const Bucket::Entry& entry) override;
  bool Alive() const override;
  void Interrupt() const override { CheckInterrupt(); }
  // Sets the function that Interrupt calls. Must be called once, before any thread waits.
  static void SetInterrupt(std::function<void()> interrupt);
  static void CheckInterrupt();  // called while a thread waits; may throw to end the wait, for Ctrl-C
  bool ControllerIsGone() const { return alive_.expired(); }

 private:
  std::vector<Closing> OpenAll(const hvd::ResponseList& responses);
  Time ForeignSince(Time now);
  const char* FinalHook() const { return coordination_ != nullptr ? "SendFinalTensors" : "RecvFinalTensors"; }
  void Guard(const char* hook, const std::function<void()>& body);

  hvd::Controller& controller_;                 // the controller, for the background thread
  const std::weak_ptr<hvd::Controller> alive_;  // the controller, for the application's threads: it may be gone
  std::atomic<bool> retired_{false};            // true once Retire has been called
  std::atomic<hvd::HorovodGlobalState*> state_{nullptr};
  // `process_set_id_`, `recorder_`, `members_` and `process_set_` are written once, before `state_` is set.
  std::int32_t process_set_id_ = 0;
  std::shared_ptr<recording::Recorder> recorder_;
  std::vector<Rank> members_;
  hvd::ProcessSet* process_set_ = nullptr;
  // True once this rank's hook has run that sends or receives requests, or responses. The handshake checks both.
  std::atomic<bool> ready_hook_ran_{false}, final_hook_ran_{false};
  Outstanding outstanding_;
  OutstandingWatch foreign_;
  std::atomic<std::uint64_t> cycles_{0};
  std::atomic<bool> failed_{false};  // true if this rank asks for a shutdown: a hook failed, or a stall lasts too long

  // --- Members that only Horovod's background thread uses
  std::string broken_;                      // the error after which nothing can be reduced; empty without one
  std::string failure_;                     // the error of a hook, which is sent to the other ranks
  std::map<std::string, Closing> grouped_;  // closed rounds that name groups and are not executed yet, by WireName
  std::optional<GroupCommunicators> communicators_;
  std::optional<Entries> entries_;
  std::optional<CycleRecord> record_;
  const bool keeps_cycle_time_ = std::getenv("HOROVOD_CYCLE_TIME") != nullptr;
  int short_cycles_ = 0;                        // how many of Horovod's next cycles shall be short
  std::unique_ptr<Coordination> coordination_;  // the coordinator; null on ranks other than 0

  Engine engine_;
};

}  // namespace horovod_partial::attach
