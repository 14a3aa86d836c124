// One process set of one generation of Horovod: its engine and, on rank 0, its coordinator.
#pragma once

#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "attach/group_communicators.h"
#include "attach/horovod.h"
#include "attach/outstanding.h"
#include "core/coordinator.h"
#include "engine/collectives.h"
#include "engine/engine.h"

namespace horovod_partial::attach {

// Which of the hooks that carry messages have run; before the first round a handshake proves that all have.
enum Hook : unsigned {
  kSendReadyTensors = 1,
  kRecvReadyTensors = 2,
  kSendFinalTensors = 4,
  kRecvFinalTensors = 8,
};

// Of this process, for all its sessions.
const std::shared_ptr<Bringers>& ProcessBringers();

// Made when Horovod initialises a controller, and closed when that controller's successor appears or Horovod shuts
// down. The hooks run on Horovod's background thread, and Place within them; Alive and Interrupt on the application's.
class Session final : public Collectives, public std::enable_shared_from_this<Session> {
 public:
  Session(hvd::Controller& controller, const Engine::Thresholds& thresholds);

  Engine& engine() { return engine_; }
  const Engine& engine() const { return engine_; }

  // Horovod has been initialised anew: nothing is accepted any more, and every wait ends.
  void Retire();
  // Where Horovod's state is, and the recorder of this generation. Before that is known the hooks do nothing, and
  // nothing can be submitted.
  void SetState(hvd::HorovodGlobalState& state, std::int32_t process_set_id,
                std::shared_ptr<recording::Recorder> recorder, bool waits_are_told);
  // Of the generation, for all its process sets; null before SetState.
  const std::shared_ptr<recording::Recorder>& recorder() const { return recorder_; }
  bool ready() const { return state_ != nullptr; }

  // --- Any thread, of a session that is ready: for signs of life
  // The longest wait of ours in this process, of whatever session.
  static Bringers::Wait LongestWait();
  // The ranks of the process set, as they are numbered in the job; empty for all.
  const std::vector<Rank>& members() const { return members_; }
  // One of Horovod's own collectives that are outstanding; how often the one that the ticks watch has become another
  // one; and how often they have looked.
  std::string FindForeign() { return outstanding_.Find(); }
  std::uint64_t foreign_changes() const { return foreign_changes_; }
  std::uint64_t cycles() const { return cycles_; }

  std::atomic<bool> handshaken{false};
  // What the handshake has to find, as a text that names the hooks that did not run, or "".
  std::string MissingHooks() const;
  std::map<std::string, Coordinator::Offsets> ArrivalOffsets() const;
  std::map<std::string, std::int64_t> UnconnectedWindows() const;
  // Where this rank's buckets lie, by Horovod's number; the host, if none lies on a device.
  int device() const;

  // --- Background thread, in the order of a cycle
  void Tick(std::vector<long long>& status_bits);
  // The same bits as on all other ranks.
  void AfterTick(const std::vector<long long>& status_bits);
  void BeforeSendReady(hvd::RequestList& requests);
  void AfterRecvReady(std::vector<std::string>& ready_to_reduce, std::vector<hvd::RequestList>& ready);
  void BeforeSendFinal(hvd::ResponseList& responses);
  void AfterSendFinal(hvd::ResponseList& responses);
  void AfterRecvFinal(hvd::ResponseList& responses);
  // `reduce` is the operation's own execution of a response; a round of ours runs in this rank's group.
  using Reduce = std::function<hvd::Status(const hvd::Response&)>;
  hvd::Status Execute(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response, Carrier carrier,
                      const Reduce& reduce);
  // A reduction over Gloo has failed halfway, and peers may still send what belongs to it. Horovod would go on to its
  // next cycle on the same connections, where Gloo ends the process when it meets that. So what is left of this cycle
  // is not reduced, and the next hook, before it communicates, ends Horovod's loop by the one exception that a hook
  // lets out: connections close, and all ranks learn.
  void Break(const std::string& error) { broken_ = error; }
  void EndIfBroken() const;

  // --- Collectives
  void Place(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Entry& entry) override;
  bool Alive() const override;
  void Interrupt() const override { CheckInterrupt(); }
  static void SetInterrupt(std::function<void()> interrupt);
  static void CheckInterrupt();  // may throw what ends a wait, as Ctrl-C does
  bool ControllerIsGone() const { return alive_.expired(); }

 private:
  void WatchForShutdown();
  hvd::TensorTableEntry MakeEntry(const std::shared_ptr<SharedBucket>& bucket, const Bucket::Entry& entry);
  int DeviceOfThisRank() const;
  int OwnJoinDevice() const;
  std::string JoinRefusal(const std::string& bucket) const;
  // An entry of zeros, whose result nobody wants, unless there is an entry.
  void PlaceZeros(const std::string& bucket, hvd::DataType type, std::int64_t elements, int device);
  std::vector<hvd::Request> RowOf(const Closing& closing) const;
  void FillMissing(const hvd::ResponseList& responses);
  std::vector<Closing> OpenAll(const hvd::ResponseList& responses);
  Time ForeignSince(Time now);
  void Guard(const char* hook, const std::function<void()>& body);
  void WatchWaits(Time now);
  void NoteJoin(const hvd::ResponseList& responses);
  hvd::Status ExecuteRounds(std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response, Carrier carrier,
                            const Reduce& reduce, const std::vector<Closing>& closings);
  void RecordHanded(Time now);
  void RecordReduction(const std::vector<hvd::TensorTableEntry>& entries, const hvd::Response& response, Time begin,
                       bool everyone);
  void RecordDecisions(const std::vector<Closing>& closings, Time now) const;
  void Observe(Rank rank, const Report& report, Time now);
  void NoteFailure(Rank rank, const std::string& failure);
  void SayWhy(hvd::ResponseList& responses);

  hvd::Controller& controller_;                 // background thread
  const std::weak_ptr<hvd::Controller> alive_;  // the same, for the application's threads
  std::atomic<bool> retired_{false};            // its successor is there
  const Rank rank_;
  const int size_;
  std::atomic<hvd::HorovodGlobalState*> state_{nullptr};
  // Written before state_, and never again.
  std::int32_t process_set_id_ = 0;
  std::shared_ptr<recording::Recorder> recorder_;
  std::vector<Rank> members_;
  hvd::ProcessSet* process_set_ = nullptr;
  std::atomic<unsigned> hooks_run_{0};
  Outstanding outstanding_;
  std::atomic<std::uint64_t> foreign_changes_{0};
  std::atomic<std::uint64_t> cycles_{0};
  std::atomic<bool> failed_{false};  // a hook met an internal error: this rank asks for shutdown

  // Background thread only.
  std::string broken_;                             // why no reduction can follow; empty while all is well
  std::string failure_;                            // what a hook has met, for the other ranks
  std::string foreign_;                            // a collective that is not ours, outstanding
  std::weak_ptr<hvd::OpContext> foreign_context_;  // and which of that name; a barrier has none
  Time foreign_since_ = kNever;
  std::vector<Grants> grants_;              // coordinator: decided in this cycle
  std::map<std::string, Closing> closed_;   // coordinator: decided in this cycle, by wire name
  std::map<std::string, Closing> grouped_;  // rounds with groups, now or later, that have not been executed yet
  std::unique_ptr<GroupCommunicators> communicators_;
  std::int64_t sequence_ = 0;         // of allreduces, the same on all ranks
  std::size_t known_ = 1;             // entries in Horovod's table that have been recorded; one is the session's own
  std::vector<bool> joined_;          // coordinator
  std::map<Rank, int> join_devices_;  // coordinator: where those that have joined have Horovod's zeros
  std::string failures_;              // coordinator: which rank has failed, and why, until all have been told
  Time last_watch_{0};
  const bool keeps_cycle_time_ = std::getenv("HOROVOD_CYCLE_TIME") != nullptr;
  int short_cycles_ = 0;  // how many more there shall be
  std::string warned_;

  mutable std::mutex coordinator_mutex_;      // guards coordinator_ against readers of statistics
  std::unique_ptr<Coordinator> coordinator_;  // on rank 0

  Engine engine_;
};

}  // namespace horovod_partial::attach
