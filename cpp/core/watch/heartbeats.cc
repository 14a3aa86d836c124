#include "core/watch/heartbeats.h"

#include <sstream>

#include "core/values/bytes.h"

namespace horovod_partial {
namespace {

constexpr std::string_view kMagic = "HPhb";

// Compares two texts. The time does not depend on where they differ, so nobody can guess a secret byte by byte.
bool AreEqual(std::string_view left, std::string_view right) {
  if (left.size() != right.size()) return false;
  unsigned char difference = 0;
  for (std::size_t i = 0; i < left.size(); ++i) difference |= static_cast<unsigned char>(left[i] ^ right[i]);
  return difference == 0;
}

}  // namespace

std::optional<Rank> Heartbeats::Pass() {
  std::optional<Rank> missing;
  for (auto& [rank, intervals] : silent_)
    if (++intervals > limit_ && !missing) missing = rank;
  return missing;
}

int Heartbeats::Silence(Rank rank) const {
  const auto found = silent_.find(rank);
  return found == silent_.end() ? 0 : found->second;
}

std::string Hello::Encode() const { return std::string(kMagic) + secret + BytesOf(rank); }

std::optional<Hello> Hello::Decode(std::string_view bytes, std::string_view secret, int size) {
  if (bytes.size() != kBytes || bytes.substr(0, kMagic.size()) != kMagic) return std::nullopt;
  if (!AreEqual(bytes.substr(kMagic.size(), kSecretBytes), secret)) return std::nullopt;
  const auto rank = FromBytes<Rank>(std::string(bytes.substr(kMagic.size() + kSecretBytes)), "a hello");
  if (rank < 1 || rank >= size) return std::nullopt;
  return Hello{std::string(secret), rank};
}

std::string Endpoint::Encode() const {
  std::string text = std::to_string(port) + ' ' + secret;
  for (const auto& address : addresses) text += ' ' + address;
  return text;
}

Endpoint Endpoint::Decode(const std::string& text) {
  std::istringstream words(text);
  Endpoint endpoint;
  words >> endpoint.port >> endpoint.secret;
  for (std::string address; words >> address;) endpoint.addresses.push_back(address);
  return endpoint;
}

}  // namespace horovod_partial
