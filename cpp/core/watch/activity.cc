#include "core/watch/activity.h"

#include <cstring>
#include <stdexcept>

namespace horovod_partial {

const Activity& Lasting::Pass(const Look& look) {
  held_ = look.cycles == last_.cycles ? held_ + 1 : 0;
  const int intervals = last_.activity.intervals;
  last_.activity.intervals = look.activity.intervals;
  const bool same = look.number == last_.number && look.activity == last_.activity;
  last_ = look;
  last_.activity.intervals = same ? intervals + 1 : 0;
  return last_.activity;
}

std::optional<std::string> Words::Next() {
  std::uint32_t size = 0;
  if (bytes_.size() < sizeof size) return std::nullopt;
  std::memcpy(&size, bytes_.data(), sizeof size);
  if (size > kLongest) throw std::runtime_error("a message of " + std::to_string(size) + " bytes is too long");
  if (bytes_.size() < sizeof size + size) return std::nullopt;
  std::string word = bytes_.substr(sizeof size, size);
  bytes_.erase(0, sizeof size + size);
  return word;
}

}  // namespace horovod_partial
