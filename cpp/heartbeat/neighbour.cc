#include "heartbeat/neighbour.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <csignal>

namespace horovod_partial::heartbeat {
namespace {

// The numbers of the system calls pidfd_send_signal and pidfd_open, which older headers lack.
constexpr long kPidfdSendSignal = 424, kPidfdOpen = 434;

}  // namespace

Neighbour::Neighbour(pid_t number) : process_(static_cast<int>(syscall(kPidfdOpen, number, 0))) {}

void Neighbour::Kill() const {
  if (process_.is_open()) syscall(kPidfdSendSignal, process_.number(), SIGKILL, nullptr, 0);
}

}  // namespace horovod_partial::heartbeat
