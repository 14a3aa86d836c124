// Decision logs, as users hand them to `horovod-partial replay`; and through them the coordinator, with whatever a rank
// may have reported.
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include "core/decision_log.h"

using namespace horovod_partial;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::istringstream in(std::string(reinterpret_cast<const char*>(data), size));
  try {
    static_cast<void>(ReplayDecisions(in));
  } catch (const std::runtime_error&) {
  }
  return 0;
}
