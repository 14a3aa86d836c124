#include "bindings/monitor_calls.h"

#include <unistd.h>

#include <array>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>

#include "attach/attachment.h"
#include "attach/coordination.h"
#include "bindings/stacks.h"
#include "engine/log.h"
#include "heartbeat/machine.h"
#include "heartbeat/socket.h"

namespace horovod_partial {
namespace {

// How long to wait until standard error can be written. If a launcher is stopped, it does not read standard error.
constexpr std::chrono::seconds kWritePatience(1);

// Returns a function that ends this process at once. If a rank gives no sign of life, Horovod's thread is blocked for
// ever, so no orderly end is possible. First the function kills that rank's process, if it is on this host, because a
// stopped process does not react to its launcher.
std::function<void(Rank)> EndWithoutRank(Rank rank, heartbeat::Seconds limit, const std::map<Rank, pid_t>& neighbours) {
  auto processes = std::make_shared<std::map<Rank, heartbeat::Neighbour>>();
  for (const auto& [of, number] : neighbours) processes->emplace(of, number);
  return [rank, limit, processes](Rank missing) {
    std::ostringstream text;
    text << "rank " << missing << " has given no sign of life for " << limit.count()
         << " s (HOROVOD_PARTIAL_ABORT_SECONDS): it is stopped, or its host or its network is down. This rank ends. "
            "Start the job again from its last checkpoint";
    if (const auto found = processes->find(missing); found != processes->end() && missing != rank) found->second.Kill();
    if (heartbeat::IsWritable(STDERR_FILENO, kWritePatience)) Log(LogLevel::kError, rank, text.str());
    std::_Exit(EXIT_FAILURE);
  };
}

std::string Heading(const std::string& doing) {
  std::array<char, HOST_NAME_MAX + 1> host{};
  gethostname(host.data(), HOST_NAME_MAX);
  return "process " + std::to_string(getpid()) + " on " + host.data() + " " + doing +
         ". The stacks of all its threads:";
}

}  // namespace

heartbeat::Calls MonitorCalls(Rank rank, const heartbeat::Limits& limits, const std::map<Rank, pid_t>& neighbours) {
  heartbeat::Calls calls;
  calls.missing = EndWithoutRank(rank, limits.abort, neighbours);
  calls.look = attach::LookAtThisRank;
  calls.steps = attach::TakeStepsOfThisRank;
  calls.explains = attach::NoteLoggedWait;
  // Another thread writes to standard error, because a slow or stopped reader would hold up the heartbeats.
  calls.tell = [rank](const std::string& text, const std::string& doing) {
    const auto say = [=] {
      if (!Logs(LogLevel::kWarning) || !heartbeat::IsWritable(STDERR_FILENO, kWritePatience)) return;
      if (!text.empty()) Log(LogLevel::kWarning, rank, text);
      if (!doing.empty()) Log(LogLevel::kWarning, rank, Heading(doing) + '\n' + TakeStacks());
    };
    try {
      std::thread(say).detach();
    } catch (const std::system_error&) {  // there are too many threads: nothing is logged, and the job goes on
    }
  };
  return calls;
}

}  // namespace horovod_partial
