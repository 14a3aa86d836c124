// Closings, as another coordinator may send them.
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "core/rounds/message.h"

using namespace horovod_partial;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::vector<std::int32_t> words(size / sizeof(std::int32_t));
  if (!words.empty()) std::memcpy(words.data(), data, words.size() * sizeof(std::int32_t));
  std::size_t at = 0;
  try {
    while (at < words.size()) {
      const std::size_t before = at;
      const Closing closing = DecodeClosing(words, at);
      if (at <= before || at > words.size()) __builtin_trap();
      // What is asked of it on every rank.
      for (Rank rank = 0; rank < static_cast<Rank>(closing.contributions.size()); ++rank) {
        if (closing.gradients(rank) > closing.gradients()) __builtin_trap();
        static_cast<void>(closing.members(rank));
        static_cast<void>(closing.fresh(rank));
      }
    }
  } catch (const std::runtime_error&) {
  }
  return 0;
}
