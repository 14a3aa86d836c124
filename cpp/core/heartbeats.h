// Which ranks are missing: those whose sign of life has not come for long (docs/protocol.md, rule 13).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/types.h"

namespace horovod_partial {

// One rank's watch over others. Time is counted in intervals of this process's own: while it is stopped itself, none
// passes, and what the others have sent meanwhile is heard before the next one. So a rank that was stopped accuses
// nobody when it goes on.
class Heartbeats {
 public:
  // A rank is missing when it has not been heard in more than `limit` intervals.
  explicit Heartbeats(int limit) : limit_(limit) {}

  // A sign of life. The first one begins the watch over a rank.
  void Heard(Rank rank) { silent_[rank] = 0; }
  // The rank's process has ended. Whoever has started it notices that, and Horovod does: it is not missing.
  void Gone(Rank rank) { silent_.erase(rank); }
  // An interval has passed. The lowest of the missing ranks, if there is one.
  std::optional<Rank> Pass();
  // For how many intervals a rank has not been heard; 0 if it is not watched.
  int Silence(Rank rank) const;

 private:
  int limit_;
  std::map<Rank, int> silent_;  // intervals since each rank was heard
};

// What a rank says first to rank 0: the secret of this job, and who it is.
struct Hello {
  static constexpr std::size_t kSecretBytes = 16;
  static constexpr std::size_t kBytes = 4 + kSecretBytes + 4;

  std::string secret;
  Rank rank = 0;

  std::string Encode() const;
  // Nothing if these are not the bytes of a hello with this secret from one of the ranks 1 to `size` - 1.
  static std::optional<Hello> Decode(std::string_view bytes, std::string_view secret, int size);
};

// What rank 0 says when a rank is missing: all others end.
struct MissingNotice {
  static constexpr std::size_t kBytes = 4;

  Rank rank = 0;

  std::string Encode() const;
  // Throws std::runtime_error where the bytes are not those of a notice.
  static MissingNotice Decode(const std::string& bytes);
};

// Where rank 0 is reached, as text that the ranks gather.
struct Endpoint {
  std::uint16_t port = 0;
  std::string secret;
  std::vector<std::string> addresses;

  std::string Encode() const;
  // Throws std::runtime_error where the secret is not one.
  static Endpoint Decode(const std::string& text);
};

}  // namespace horovod_partial
