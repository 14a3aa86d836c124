// The state of this rank's flush, a barrier at which all late contributions are delivered (docs/protocol.md, rule 8).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "core/rounds/message.h"
#include "engine/possible_arrivals.h"
#include "engine/surroundings.h"

namespace horovod_partial {

// At most one thread of the application is in a flush. The background thread reports the flush, and begins and ends its
// rounds. Functions of Flush never block. The thread in the flush waits for Surroundings::changes, then calls IsOver.
class Flush {
 public:
  using Kind = Report::Flush;

  explicit Flush(Surroundings& surroundings) : surroundings_(surroundings) {}

  // --- Functions that the thread in the flush calls:
  // Records that the calling thread enters a flush. Throws std::invalid_argument if another thread is in one already.
  void Enter(Kind kind);
  // Records that the thread in the flush waits for other ranks from now on. Returns false if no wait is needed.
  bool Begin();
  // Returns true if all ranks are in the flush and all late contributions are delivered. If this rank has ended
  // (kEnding) and another rank only flushed, begins to wait anew. Throws EngineError if the flush has failed.
  bool IsOver();
  void Leave();

  // --- Functions that the background thread calls:
  // Returns what this cycle's report says of the flush.
  Kind ToReport();
  // Records that `rounds` rounds of a flush have begun. `over`: the flush's kind if all rounds have begun, else kNone.
  void BeginRounds(int rounds, Kind over);
  void EndRound(const std::string& error);
  // Ends this rank's flush if the rank uses no bucket any more, because then no round closes that could end the flush.
  void Release();

  // --- Functions that any thread calls:
  // Returns the kind of the flush in which a thread waits for other ranks, or kNone.
  Kind waits_in() const;
  // Returns true if all rounds of the flush have begun, and the application is still in the flush.
  bool bounds() const { return stage_ >= Stage::kClosed; }
  // Makes the present flush fail, because it cannot deliver the late contributions to a bucket that has failed.
  void Refuse(const std::string& error);
  // Makes the present flush and all later flushes fail.
  void Fail(const std::string& error);

 private:
  enum class Stage : std::uint8_t {
    kNone,      // no thread is in a flush
    kEntered,   // a thread is in a flush and does not wait yet
    kWaiting,   // the thread in the flush waits for other ranks
    kReported,  // the flush has been reported to the coordinator, or is reported in this cycle
    kClosed,    // all rounds of the flush have begun; some are still reduced, or have failed
    kOver,
  };
  bool BeginUnderLock();
  void Close(Kind over);
  void EndUnlessFailed();
  void StopWaiting();

  Surroundings& surroundings_;
  std::mutex mutex_;  // this mutex guards the members below; it may be locked under a bucket's lock, not vice versa
  // `stage_` and `kind_` are atomic: Horovod's background thread reads them in each cycle, and must not wait for locks.
  std::atomic<Stage> stage_{Stage::kNone};
  std::atomic<Kind> kind_{Kind::kNone};
  Kind over_ = Kind::kNone;                             // from stage kClosed on: the kind of flush all ranks were in
  std::shared_ptr<PossibleArrivals::Bringer> bringer_;  // the thread that waits in the flush, or null
  int rounds_ = 0;                                      // the number of running rounds that belong to flushes
  std::string refusal_;                                 // why the present flush has failed; empty if it has not
  std::string failure_;  // why the present and all later flushes fail; empty if they do not
};

}  // namespace horovod_partial
