// Finds ranks that are missing: their signs of life have not come for long (docs/protocol.md, rule 13).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/values/types.h"

namespace horovod_partial {

// One rank's watch over others. It counts time in intervals of its own process. While this process is stopped, no
// interval passes, and it hears what the others have sent before the next one passes. So a rank that was stopped
// accuses nobody when it goes on.
class Heartbeats {
 public:
  // A rank is missing if it was not heard for more than `limit` intervals.
  explicit Heartbeats(int limit) : limit_(limit) {}

  // Call it for each sign of life. The first one begins the watch over a rank.
  void Heard(Rank rank) { silent_[rank] = 0; }
  // The rank's process has ended, so it is not missing. Its launcher and Horovod notice the end.
  void Gone(Rank rank) { silent_.erase(rank); }
  // Call it when an interval has passed. Returns the lowest missing rank, if there is one.
  std::optional<Rank> Pass();
  // Returns for how many intervals a rank was not heard; 0 if it is not watched.
  int Silence(Rank rank) const;

 private:
  int limit_;
  std::map<Rank, int> silent_;  // intervals since each rank was heard
};

// The first message of a rank to rank 0: the secret of this job, and the rank's number.
struct Hello {
  static constexpr std::size_t kSecretBytes = 16;
  static constexpr std::size_t kBytes = 4 + kSecretBytes + 4;

  std::string secret;
  Rank rank = 0;

  std::string Encode() const;
  // Returns nothing if the bytes are not a hello with this secret from one of the ranks 1 to `size` - 1.
  static std::optional<Hello> Decode(std::string_view bytes, std::string_view secret, int size);
};

// The message of rank 0 when a rank is missing: all others end.
struct MissingNotice {
  static constexpr std::size_t kBytes = 4;

  Rank rank = 0;

  std::string Encode() const;
  // Throws std::runtime_error if the bytes do not encode a notice.
  static MissingNotice Decode(const std::string& bytes);
};

// The addresses of rank 0, as text that the ranks gather.
struct Endpoint {
  std::uint16_t port = 0;
  std::string secret;
  std::vector<std::string> addresses;

  std::string Encode() const;
  // Throws std::runtime_error if the secret is malformed.
  static Endpoint Decode(const std::string& text);
};

}  // namespace horovod_partial
