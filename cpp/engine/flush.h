// How far the flush of this rank is (docs/protocol.md, rule 8).
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
// rounds. No function here blocks: the thread in the flush waits for Surroundings::changes, and then asks again.
class Flush {
 public:
  using Kind = Report::Flush;

  explicit Flush(Surroundings& surroundings) : surroundings_(surroundings) {}

  // --- Called by the thread in the flush
  // Throws std::invalid_argument if another thread is in a flush.
  void Enter(Kind kind);
  // Begins to wait for the other ranks. Returns false if there is nothing to wait for.
  bool Begin();
  // Returns true if all ranks are in the flush and all late contributions are delivered. If this rank waits for the end
  // of all ranks, and the others only flushed, the wait begins anew. Throws EngineError if the flush has failed.
  bool IsOver();
  void Leave();

  // --- Called by the background thread
  // Returns what this cycle's report says of the flush.
  Kind ToReport();
  // Records that `rounds` rounds of a flush have begun. `over` is the flush's kind if all have begun, else kNone.
  void BeginRounds(int rounds, Kind over);
  void EndRound(const std::string& error);
  // Ends the flush if no bucket is in use any more, because no closing would end it.
  void Release();

  // --- Called by any thread
  // Returns the kind of the flush in which a thread waits for other ranks.
  Kind waits_in() const;
  // Returns true if all rounds of the flush have begun, and the application is still in the flush.
  bool bounds() const { return stage_ >= Stage::kClosed; }
  // Records that a bucket has failed in which the present flush had something to deliver.
  void Refuse(const std::string& error);
  // Makes the present flush and all later flushes fail.
  void Fail(const std::string& error);

 private:
  enum class Stage : std::uint8_t {
    kNone,      // no thread is in a flush
    kEntered,   // a thread is in a flush and does not wait yet
    kWaiting,   // the thread waits
    kReported,  // the flush has been reported to the coordinator, or is reported in this cycle
    kClosed,    // all rounds of the flush have begun; some are still reduced, or have failed
    kOver,
  };
  bool BeginUnderLock();
  void Close(Kind over);
  void EndUnlessFailed();
  void StopWaiting();

  Surroundings& surroundings_;
  std::mutex mutex_;  // guards the members below; may be taken under a bucket's lock, never the other way round
  // Atomic, because the hook that runs in every cycle reads these two and must not wait.
  std::atomic<Stage> stage_{Stage::kNone};
  std::atomic<Kind> kind_{Kind::kNone};
  Kind over_ = Kind::kNone;                             // from kClosed on: the kind of the flush that all ranks were in
  std::shared_ptr<PossibleArrivals::Bringer> bringer_;  // the thread in the flush, while it waits
  int rounds_ = 0;       // rounds of this or an earlier flush that have begun and not ended
  std::string refusal_;  // why the present flush has failed
  std::string failure_;  // why every flush fails
};

}  // namespace horovod_partial
