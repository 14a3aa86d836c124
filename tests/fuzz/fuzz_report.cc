// Reports, as another rank may send them.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/message.h"

using namespace horovod_partial;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    const std::string again = Encode(DecodeReport(bytes));
    // What could be read is written as it was.
    if (again != bytes) __builtin_trap();
  } catch (const std::runtime_error&) {
  }
  return 0;
}
