#include "engine/flush.h"

#include <stdexcept>
#include <utility>

namespace horovod_partial {

void Flush::Enter(Kind kind) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stage_ != Stage::kNone) throw std::invalid_argument("a flush is under way in another thread");
  kind_ = kind;
  stage_ = Stage::kEntered;
}

bool Flush::Begin() {
  std::lock_guard<std::mutex> lock(mutex_);
  return BeginUnderLock();
}

bool Flush::BeginUnderLock() {
  // If a process set has only one rank, that rank is never late, and has nothing pending.
  const bool needed = surroundings_.size > 1 && surroundings_.in_use > 0;
  over_ = kind_;
  stage_ = needed ? Stage::kWaiting : Stage::kOver;
  if (!needed) return false;
  refusal_.clear();
  bringer_ = surroundings_.arrivals->BeginFlush(surroundings_.engine, Now());
  surroundings_.news = true;
  return true;
}

bool Flush::IsOver() {
  std::lock_guard<std::mutex> lock(mutex_);
  // A flush that is over succeeds even if Horovod is shut down. Another rank may shut it down when all have ended.
  if (stage_ == Stage::kOver && kind_ == Kind::kEnding && over_ == Kind::kFlushing) BeginUnderLock();
  if (stage_ == Stage::kOver) return true;
  if (!failure_.empty()) throw EngineError(failure_);
  if (!refusal_.empty()) throw EngineError(refusal_);
  return false;
}

void Flush::Leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  StopWaiting();
  stage_ = Stage::kNone;
  surroundings_.news = true;  // the coordinator must hear that this rank is in no flush any more
}

Flush::Kind Flush::ToReport() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stage_ == Stage::kWaiting) stage_ = Stage::kReported;
  return waits_in();
}

void Flush::BeginRounds(int rounds, Kind over) {
  std::lock_guard<std::mutex> lock(mutex_);
  rounds_ += rounds;
  // If this rank's flush is not reported yet, `over` means an earlier flush, which this rank has given up.
  if (over != Kind::kNone && stage_ == Stage::kReported) Close(over);
}

// Called when all rounds of the flush have begun on this rank. The thread in the flush waits for no rank any more,
// though a device may still reduce. If the thread counted as waiting, the next round might close without this rank.
void Flush::Close(Kind over) {
  StopWaiting();
  over_ = over;
  stage_ = Stage::kClosed;
  if (rounds_ == 0) EndUnlessFailed();
  surroundings_.changes.Tell();
}

void Flush::EndRound(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!error.empty()) failure_ = error;
  if (--rounds_ == 0 && stage_ == Stage::kClosed) EndUnlessFailed();
  surroundings_.changes.Tell();
}

void Flush::EndUnlessFailed() {
  if (failure_.empty() && refusal_.empty()) stage_ = Stage::kOver;
}

void Flush::Release() {
  if (surroundings_.in_use > 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (waits_in() != Kind::kNone) Close(kind_);
}

Flush::Kind Flush::waits_in() const {
  const Stage stage = stage_;
  return stage == Stage::kWaiting || stage == Stage::kReported ? kind_.load() : Kind::kNone;
}

void Flush::Refuse(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (waits_in() != Kind::kNone) refusal_ = error;
  surroundings_.changes.Tell();
}

void Flush::Fail(const std::string& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  failure_ = error;
  surroundings_.changes.Tell();
}

void Flush::StopWaiting() {
  if (bringer_ != nullptr) surroundings_.arrivals->EndFlush(*std::exchange(bringer_, nullptr), Now());
}

}  // namespace horovod_partial
