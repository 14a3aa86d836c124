// A bucket's declaration, from the names and numbers that frameworks pass: the same for Python and for TensorFlow's
// graphs.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "attach/device.h"
#include "bindings/names.h"
#include "engine/engine.h"

namespace horovod_partial {

// Everything but type, shape and device, by the names that Python gives it.
struct BucketArguments {
  std::string missed;
  std::string late;
  bool divide_by_contributors = false;
  bool drop_nonfinite = false;
  bool drop_nonfinite_results = false;
  std::string weights;
  double weight_parameter = 1;
  double prescale_factor = 1;
  double postscale_factor = 1;
};

// Throws std::invalid_argument for an unknown name.
inline BucketConfig MakeConfig(DataType type, const std::vector<std::int64_t>& shape, int device, const Policy& policy,
                               const BucketArguments& arguments) {
  BucketConfig config;
  config.options.memory = &attach::MemoryOf(device);
  config.options.type = type;
  config.options.elements = 1;
  for (const std::int64_t dimension : shape) config.options.elements *= static_cast<std::size_t>(dimension);
  config.options.missed = MissedFromName(arguments.missed);
  config.options.late = LateFromName(arguments.late);
  config.options.divisor = arguments.divide_by_contributors ? Divisor::kContributors : Divisor::kNone;
  config.options.drop_nonfinite = arguments.drop_nonfinite;
  config.options.drop_nonfinite_results = arguments.drop_nonfinite_results;
  config.options.weights = ByName<Weights>(
      "weights", arguments.weights,
      {{"uniform", Weights::kUniform}, {"contraction", Weights::kContraction}, {"staleness", Weights::kStaleness}});
  config.options.weight_parameter = arguments.weight_parameter;
  config.policy = policy;
  config.shape = shape;
  config.prescale_factor = arguments.prescale_factor;
  config.postscale_factor = arguments.postscale_factor;
  return config;
}

}  // namespace horovod_partial
