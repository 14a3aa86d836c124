// The log of C++ and Python. It goes to standard error, and each line names the rank.
#pragma once

#include <string>

#include "core/values/types.h"

namespace horovod_partial {

enum class LogLevel : int { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };  // numbers of Python's log levels

// Sets the lowest level of the messages that are logged. Thread-safe.
void SetLogLevel(LogLevel level);
bool Logs(LogLevel level);
void Log(LogLevel level, Rank rank, const std::string& text);

}  // namespace horovod_partial
