// What a rank does, as far as others may wait for it: what signs of life carry (docs/protocol.md, rule 14).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/fields.h"
#include "core/types.h"

namespace horovod_partial {

struct Activity {
  enum class Kind : std::uint8_t {
    kComputing,  // or sleeps: whatever a program does by itself
    kWaiting,    // for other ranks
    kResting,    // it has joined or has come to its end: it misses nobody, and nobody misses it
  };
  Kind kind = Kind::kComputing;
  std::string what;          // for what it waits, or where it rests, in words
  std::vector<Rank> needed;  // the ranks that may end the wait; empty for all
  int intervals = 0;         // of its own for which that has lasted

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("kind", self.kind), Named("what", self.what), Named("needed", self.needed),
                           Named("intervals", self.intervals));
  }
  bool operator==(const Activity& other) const { return Fields(*this) == Fields(other); }
};

constexpr std::array<const char*, 3> NamesOf(Activity::Kind /*kind*/) { return {"computing", "waiting", "resting"}; }

std::string Encode(const Activity& activity);
// Throws std::runtime_error where the bytes are not those of an activity.
Activity DecodeActivity(const std::string& bytes);

// What a look at this process has found.
struct Look {
  Activity activity;         // without the intervals
  std::uint64_t number = 0;  // tells waits of the same kind and for the same thing apart
  std::uint64_t cycles = 0;  // of Horovod's, so far
};

// Counts for how many intervals the same activity has lasted. A process that is stopped lets no interval pass, so its
// stop makes no wait longer.
class Lasting {
 public:
  // An interval has passed, and this was seen at its end.
  const Activity& Pass(const Look& look);
  const Activity& last() const { return last_.activity; }
  // Intervals for which Horovod has begun no cycle: another rank holds it up.
  int held() const { return held_; }

 private:
  Look last_;
  int held_ = 0;
};

// Words of any length on a stream of bytes.
std::string Framed(const std::string& word);
class Words {
 public:
  static constexpr std::size_t kLongest = 1 << 16;

  void Add(std::string_view bytes) { bytes_ += bytes; }
  // The next word that has come whole. Throws std::runtime_error where it would be longer than the longest.
  std::optional<std::string> Next();

 private:
  std::string bytes_;
};

}  // namespace horovod_partial
