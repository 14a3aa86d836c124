// What a rank is doing. Heartbeats tell this to rank 0, because other ranks may wait (docs/protocol.md, rule 14).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/slowness/step_timer.h"
#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

struct Activity {
  enum class Kind : std::uint8_t {
    kComputing,  // the rank computes or sleeps: anything that its program does without other ranks
    kWaiting,    // the rank waits for other ranks
    kResting,    // the rank has joined or ended: it waits for nobody, and nobody waits for it
  };
  Kind kind = Kind::kComputing;
  std::string what;          // in words: what the rank waits for, or that it has joined or ended
  std::vector<Rank> needed;  // the ranks that may end the wait; all ranks if empty
  int intervals = 0;         // how long the activity has lasted, in heartbeat intervals of this rank

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("kind", self.kind), Named("what", self.what), Named("needed", self.needed),
                           Named("intervals", self.intervals));
  }
};

constexpr std::array<const char*, 3> NamesOf(Activity::Kind /*kind*/) { return {"computing", "waiting", "resting"}; }

// The state of this process at one moment.
struct Look {
  Activity activity;         // what the process is doing; `intervals` is not set
  std::uint64_t number = 0;  // the number of the wait; two waits for the same thing have different numbers
  std::uint64_t cycles = 0;  // the number of cycles that Horovod has begun so far
};

// Counts for how many heartbeat intervals the same activity has lasted. A process that is stopped counts no intervals,
// so a stop makes no wait seem longer.
class Lasting {
 public:
  // Must be called at the end of each heartbeat interval, with the state of the process at that moment.
  const Activity& Pass(const Look& look);
  const Activity& last() const { return last_.activity; }
  // The number of heartbeat intervals in a row without a new cycle of Horovod, because another rank holds Horovod up.
  int held() const { return held_; }

 private:
  Look last_;
  int held_ = 0;
};

// Splits a stream of messages into the messages. Each has its length in front, as in the BytesOf of a text.
class Words {
 public:
  static constexpr std::size_t kLongest = 1 << 18;

  void Add(std::string_view bytes) { bytes_ += bytes; }
  // Returns the next complete message, if there is one. Throws std::runtime_error for a message longer than kLongest.
  std::optional<std::string> Next();

 private:
  std::string bytes_;
};

// What the machine does to a rank's process, in recent seconds. A value below 0 is unknown.
struct MachineSigns {
  double processors = -1;  // how many processors the process keeps busy on average
  double stolen = -1;      // the share of the machine's processor time that its hypervisor gives to others
  double throttled = -1;   // the share of scheduling periods in which the process's cgroup is throttled
  double pressure = -1;    // the share of the time in which some process waits for a processor

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("processors", self.processors), Named("stolen", self.stolen),
                           Named("throttled", self.throttled), Named("pressure", self.pressure));
  }
};

struct Beat {
  Activity activity;
  StepReport steps;
  MachineSigns signs;

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("activity", self.activity), Named("steps", self.steps), Named("signs", self.signs));
  }
};

}  // namespace horovod_partial
