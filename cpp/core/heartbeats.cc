#include "core/heartbeats.h"

#include <stdexcept>

namespace horovod_partial {
namespace {

constexpr std::string_view kMagic = "HPhb";

std::string Number(std::uint32_t value) {
  std::string bytes(4, '\0');
  for (char& byte : bytes) {
    byte = static_cast<char>(value & 0xff);
    value >>= 8;
  }
  return bytes;
}

std::uint32_t NumberIn(std::string_view bytes) {
  std::uint32_t value = 0;
  for (std::size_t i = 4; i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

// Takes as long for each pair of texts of one length, so that nobody can guess a secret byte by byte.
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

std::string Hello::Encode() const { return std::string(kMagic) + secret + Number(static_cast<std::uint32_t>(rank)); }

std::optional<Hello> Hello::Decode(std::string_view bytes, std::string_view secret, int size) {
  if (bytes.size() != kBytes || bytes.substr(0, kMagic.size()) != kMagic) return std::nullopt;
  if (!AreEqual(bytes.substr(kMagic.size(), kSecretBytes), secret)) return std::nullopt;
  const std::uint32_t rank = NumberIn(bytes.substr(kMagic.size() + kSecretBytes));
  if (rank < 1 || rank >= static_cast<std::uint32_t>(size)) return std::nullopt;
  return Hello{std::string(secret), static_cast<Rank>(rank)};
}

std::string MissingNotice::Encode() const { return Number(static_cast<std::uint32_t>(rank)); }

MissingNotice MissingNotice::Decode(std::string_view bytes) {
  if (bytes.size() != kBytes) throw std::invalid_argument("a notice of a missing rank has another length");
  return {static_cast<Rank>(NumberIn(bytes))};
}

}  // namespace horovod_partial
