#include "engine/surroundings.h"

namespace horovod_partial {

void Surroundings::ThrowShutDown() const {
  throw EngineError(
      first_failure->Explain("Horovod has been shut down, by this rank or by another one that ended or failed"));
}

}  // namespace horovod_partial
