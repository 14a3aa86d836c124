#include "core/rounds/declaration.h"

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
  if (one.members != other.members) {
    return "Mismatched members of a bucket: " + FirstDifference(first, one.members, second, other.members) +
           ". Use the same layers, in the same order, on every rank.";
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

std::string Describe(const Declaration& declaration) {
  const bool scales = declaration.prescale_factor != 1 || declaration.postscale_factor != 1;
  return std::string(NameOf(declaration.type)) + ShapeOf(declaration) + " on " +
         (declaration.device == Memory::kHost ? "the CPU" : "GPU " + std::to_string(declaration.device)) + ", " +
         declaration.policy.description + (scales ? ", scaled by " + FactorsOf(declaration) : "");
}

std::string FirstDifference(const std::string& first, const std::vector<std::string>& one, const std::string& second,
                            const std::vector<std::string>& other) {
  std::size_t at = 0;
  while (at < one.size() && at < other.size() && one[at] == other[at]) ++at;
  if (at == one.size() && at == other.size()) return {};
  const auto member = [at](const std::vector<std::string>& members) {
    return at < members.size() ? members[at] : "no more";
  };
  return second + " has " + member(other) + " instead of " + member(one) + " of " + first;
}

std::string TitleOf(const std::string& bucket, const std::vector<std::string>& members) {
  if (members.empty()) return bucket;
  const std::string others = members.size() == 1 ? "" : " and " + std::to_string(members.size() - 1) + " more";
  return bucket + " [" + members.front() + others + "]";
}

}  // namespace horovod_partial
