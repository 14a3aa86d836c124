#include "tf/status.h"

#include <stdexcept>

#include "engine/engine.h"

namespace horovod_partial::tf {

absl::Status AsStatus(const std::function<absl::Status()>& body) {
  try {
    return body();
  } catch (const EngineError& error) {
    return absl::UnknownError(error.what());
  } catch (const std::invalid_argument& error) {
    return absl::InvalidArgumentError(error.what());
  } catch (const std::exception& error) {
    return absl::FailedPreconditionError(error.what());
  }
}

}  // namespace horovod_partial::tf
