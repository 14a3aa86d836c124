// The one log of C++ and Python: standard error, with the rank in every line.
#pragma once

#include <string>

#include "core/types.h"

namespace horovod_partial {

enum class LogLevel : int { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };  // Python's numbers

// Messages below this level are dropped; any thread.
void SetLogLevel(LogLevel level);
bool Logs(LogLevel level);
void Log(LogLevel level, Rank rank, const std::string& text);

}  // namespace horovod_partial
