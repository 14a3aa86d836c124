#include "engine/log.h"

#include <atomic>
#include <cstdio>
#include <ctime>

namespace horovod_partial {
namespace {

std::atomic<LogLevel> threshold{LogLevel::kWarning};

const char* NameOf(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "DEBUG";
    case LogLevel::kInfo: return "INFO";
    case LogLevel::kWarning: return "WARNING";
    case LogLevel::kError: return "ERROR";
  }
  return "LOG";
}

}  // namespace

void SetLogLevel(LogLevel level) { threshold = level; }

bool Logs(LogLevel level) { return level >= threshold; }

void Log(LogLevel level, Rank rank, const std::string& text) {
  if (!Logs(level)) return;
  char stamp[32];
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  std::strftime(stamp, sizeof stamp, "%F %T", &parts);
  // Each line of the log is written by one call, so that lines of different threads and ranks do not mix.
  std::fprintf(stderr, "[%s] horovod_partial[%d] %s: %s\n", stamp, rank, NameOf(level), text.c_str());
}

}  // namespace horovod_partial
