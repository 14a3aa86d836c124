#include "core/declaration.h"

#include <sstream>

namespace horovod_partial {
namespace {

std::string ShapeOf(const Declaration& declaration) {
  std::string text = "[";
  for (const std::int64_t dimension : declaration.shape)
    text += (text.size() > 1 ? ", " : "") + std::to_string(dimension);
  return text + "]";
}

std::string FactorsOf(const Declaration& declaration) {
  std::ostringstream text;
  text << "(" << declaration.prescale_factor << ", " << declaration.postscale_factor << ")";
  return text.str();
}

std::string DeviceOf(const Declaration& declaration) { return declaration.device == Memory::kHost ? "CPU" : "GPU"; }

}  // namespace

std::string Disagreement(const std::string& first, const Declaration& one, const std::string& second,
                         const Declaration& other) {
  const std::string who = " (" + first + " and " + second + ")";
  if (!(one.policy == other.policy)) {
    return "Mismatched sync policies: " + first + " asked for " + one.policy.description + ", but " + second +
           " asked for " + other.policy.description + ". Use the same policy with the same settings on every rank.";
  }
  if (one.type != other.type) {
    return std::string("Mismatched data types: One rank had type ") + NameOf(one.type) +
           ", but another rank had type " + NameOf(other.type) + "." + who;
  }
  if (one.shape != other.shape) {
    return "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape " + ShapeOf(one) +
           ", but another rank sent a tensor of shape " + ShapeOf(other) + "." + who;
  }
  if (one.prescale_factor != other.prescale_factor || one.postscale_factor != other.postscale_factor) {
    return "Mismatched prescale and/or postscale factors: One rank sent factors " + FactorsOf(one) +
           ", but another rank sent factors " + FactorsOf(other) + "." + who;
  }
  if ((one.device == Memory::kHost) != (other.device == Memory::kHost)) {
    return "Mismatched ALLREDUCE CPU/GPU device selection: One rank specified device " + DeviceOf(one) +
           ", but another rank specified device " + DeviceOf(other) + "." + who;
  }
  return {};
}

}  // namespace horovod_partial
