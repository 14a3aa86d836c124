#include "core/watch/beat.h"

#include "core/values/bytes.h"

namespace horovod_partial {

std::string Encode(const Beat& beat) { return BytesOf(beat); }

Beat DecodeBeat(const std::string& bytes) { return FromBytes<Beat>(bytes, "a heartbeat"); }

}  // namespace horovod_partial
