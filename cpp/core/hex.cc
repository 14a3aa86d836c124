#include "core/hex.h"

#include <cstddef>
#include <stdexcept>

namespace horovod_partial {
namespace {

int DigitOf(char character, const char* what) {
  if (character >= '0' && character <= '9') return character - '0';
  if (character >= 'a' && character <= 'f') return character - 'a' + 10;
  throw std::runtime_error(std::string(what) + " has a character where a digit should be");
}

}  // namespace

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

std::string FromHex(const std::string& text, const char* what) {
  if (text.size() % 2 == 1) throw std::runtime_error(std::string(what) + " has half a byte");
  std::string bytes;
  for (std::size_t i = 0; i < text.size(); i += 2)
    bytes += static_cast<char>(DigitOf(text[i], what) * 16 + DigitOf(text[i + 1], what));
  return bytes;
}

}  // namespace horovod_partial
