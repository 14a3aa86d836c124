#include "core/watch/heartbeats.h"

#include <sstream>
#include <stdexcept>

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

std::string ToHex(const std::string& bytes) {
  static const char* const digits = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    const auto value = static_cast<unsigned char>(byte);
    text += digits[value / 16];
    text += digits[value % 16];
  }
  return text;
}

int DigitOf(char character) {
  if (character >= '0' && character <= '9') return character - '0';
  if (character >= 'a' && character <= 'f') return character - 'a' + 10;
  throw std::runtime_error("the endpoint of rank 0 has a character where a digit should be");
}

std::string FromHex(const std::string& text) {
  if (text.size() % 2 == 1) throw std::runtime_error("the endpoint of rank 0 has half a byte");
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); i += 2)
    bytes += static_cast<char>(DigitOf(text[i]) * 16 + DigitOf(text[i + 1]));
  return bytes;
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

std::string Hello::Encode() const {
  Writer rank_bytes;
  rank_bytes.Put(rank);
  return std::string(kMagic) + secret + rank_bytes.Take();
}

std::optional<Hello> Hello::Decode(std::string_view bytes, std::string_view secret, int size) {
  if (bytes.size() != kBytes || bytes.substr(0, kMagic.size()) != kMagic) return std::nullopt;
  if (!AreEqual(bytes.substr(kMagic.size(), kSecretBytes), secret)) return std::nullopt;
  const std::string rank_bytes(bytes.substr(kMagic.size() + kSecretBytes));
  const auto rank = Reader(rank_bytes, "a hello").Get<Rank>();
  if (rank < 1 || rank >= size) return std::nullopt;
  return Hello{std::string(secret), rank};
}

std::string Endpoint::Encode() const {
  std::string text = std::to_string(port) + ' ' + ToHex(secret);
  for (const auto& address : addresses) text += ' ' + address;
  return text;
}

Endpoint Endpoint::Decode(const std::string& text) {
  std::istringstream words(text);
  Endpoint endpoint;
  std::string secret, address;
  words >> endpoint.port >> secret;
  endpoint.secret = FromHex(secret);
  while (words >> address) endpoint.addresses.push_back(address);
  return endpoint;
}

}  // namespace horovod_partial
