// Bytes as text, two hexadecimal digits each, and back.
#pragma once

#include <string>

namespace horovod_partial {

std::string ToHex(const std::string& bytes);
// Throws std::runtime_error where the text is not what ToHex writes; `what` names the text.
std::string FromHex(const std::string& text, const char* what);

}  // namespace horovod_partial
