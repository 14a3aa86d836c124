// What a rank is doing, for ranks that may wait for it. Signs of life carry it (docs/protocol.md, rule 14).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

struct Activity {
  enum class Kind : std::uint8_t {
    kComputing,  // or asleep: anything that a program does by itself
    kWaiting,    // waits for other ranks
    kResting,    // has joined or ended: it waits for nobody, and nobody waits for it
  };
  Kind kind = Kind::kComputing;
  std::string what;          // what it waits for, or where it rests, in words
  std::vector<Rank> needed;  // the ranks that may end the wait; empty: all ranks
  int intervals = 0;         // how long the activity has lasted, in intervals of that rank

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("kind", self.kind), Named("what", self.what), Named("needed", self.needed),
                           Named("intervals", self.intervals));
  }
  bool operator==(const Activity& other) const { return Fields(*this) == Fields(other); }
};

constexpr std::array<const char*, 3> NamesOf(Activity::Kind /*kind*/) { return {"computing", "waiting", "resting"}; }

std::string Encode(const Activity& activity);
// Throws std::runtime_error if the bytes do not encode an activity.
Activity DecodeActivity(const std::string& bytes);

// The state of this process at one moment.
struct Look {
  Activity activity;         // its `intervals` is not set
  std::uint64_t number = 0;  // distinguishes waits of the same kind and for the same thing
  std::uint64_t cycles = 0;  // how many cycles Horovod has begun so far
};

// Counts for how many intervals the same activity has lasted. While a process is stopped it counts no interval, so the
// stop makes no wait seem longer.
class Lasting {
 public:
  // Call it at the end of each interval, with the state at that moment.
  const Activity& Pass(const Look& look);
  const Activity& last() const { return last_.activity; }
  // For how many intervals Horovod has begun no cycle, because another rank holds it up.
  int held() const { return held_; }

 private:
  Look last_;
  int held_ = 0;
};

// Splits a stream of bytes into messages of any length. Framed puts the length before one.
std::string Framed(const std::string& word);
class Words {
 public:
  static constexpr std::size_t kLongest = 1 << 16;

  void Add(std::string_view bytes) { bytes_ += bytes; }
  // Returns the next complete message, if there is one. Throws std::runtime_error if it would be longer than kLongest.
  std::optional<std::string> Next();

 private:
  std::string bytes_;
};

}  // namespace horovod_partial
