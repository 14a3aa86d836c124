// Finds missing ranks, from which no heartbeat has come for too long (docs/protocol.md, rule 13).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/values/types.h"

namespace horovod_partial {

// The watch of one rank over other ranks. Time is counted in heartbeat intervals of this process. While this process is
// stopped, no interval passes. When it goes on, it reads the heartbeats that came meanwhile before it counts the next
// interval. So a rank that was stopped accuses nobody.
class Heartbeats {
 public:
  // A rank is missing if no heartbeat of it came for more than `limit` intervals.
  explicit Heartbeats(int limit) : limit_(limit) {}

  // Records a heartbeat. The first heartbeat of a rank begins the watch over it.
  void Heard(Rank rank) { silent_[rank] = 0; }
  // Records that the process of a rank has ended, so the rank is not missing. Its launcher and Horovod notice the end.
  void Gone(Rank rank) { silent_.erase(rank); }
  // Must be called when a heartbeat interval has passed. Returns the lowest missing rank, if there is one.
  std::optional<Rank> Pass();
  // Returns the number of intervals since the last heartbeat of a rank, or 0 if that rank is not watched.
  int Silence(Rank rank) const;

 private:
  int limit_;
  std::map<Rank, int> silent_;  // for each rank: the number of intervals since its last heartbeat
};

// The first message of a rank to rank 0: the secret of the job, and the number of the rank.
struct Hello {
  static constexpr std::size_t kSecretBytes = 16;  // printable characters
  static constexpr std::size_t kBytes = 4 + kSecretBytes + 4;

  std::string secret;
  Rank rank = 0;

  std::string Encode() const;
  // Returns nothing unless the bytes are a hello with this secret, from one of the ranks 1 to `size` - 1.
  static std::optional<Hello> Decode(std::string_view bytes, std::string_view secret, int size);
};

// Where rank 0 listens for heartbeats. This information travels to the other ranks as a text.
struct Endpoint {
  std::uint16_t port = 0;
  std::string secret;
  std::vector<std::string> addresses;

  std::string Encode() const;
  static Endpoint Decode(const std::string& text);
};

}  // namespace horovod_partial
