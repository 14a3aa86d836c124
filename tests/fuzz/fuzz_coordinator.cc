// The coordinator, with whatever a rank may have reported.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/rounds/coordinator.h"
#include "core/values/bytes.h"

using namespace horovod_partial;

// An event is a kind, a number, the length of a text in two bytes, and that text.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr int kRanks = 3;
  Coordinator coordinator(kRanks);
  coordinator.SetDeadlockAfter(Coordinator::kDeadlockAfter);
  Time now{0};
  try {
    for (const std::uint8_t* const end = data + size; end - data >= 4;) {
      const int kind = data[0] % (kRanks + 3);
      const int number = data[1];
      const auto length = std::min<std::ptrdiff_t>(data[2] | data[3] << 8, end - data - 4);
      const std::string text(data + 4, data + 4 + length);
      data += 4 + length;
      if (kind <= kRanks) now += std::chrono::milliseconds(number * number);
      if (kind < kRanks) {
        coordinator.Observe(kind, FromBytes<Report>(text, "a report"), now);
      } else if (kind == kRanks) {
        coordinator.Decide(now);
      } else if (kind == kRanks + 1) {
        coordinator.SetJoined({(number & 1) != 0, (number & 2) != 0, (number & 4) != 0});
      } else {
        coordinator.Forget(text);
      }
    }
  } catch (const std::runtime_error&) {
  }
  return 0;
}
