#include "heartbeat/machine.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace horovod_partial::heartbeat {
namespace {

// The numbers of the system calls pidfd_send_signal and pidfd_open, which older headers lack.
constexpr long kPidfdSendSignal = 424, kPidfdOpen = 434;

// Returns the number after `word` in a file of /proc or of a cgroup, or -1. Reads only lines that begin with `line`.
double NumberAfter(const std::string& path, const std::string& word, const std::string& line = "") {
  std::ifstream file(path);
  for (std::string read; std::getline(file, read);) {
    if (read.rfind(line, 0) != 0) continue;
    std::istringstream words(read);
    for (std::string one; words >> one;) {
      double number = 0;
      if (one == word && words >> number) return number;
      if (one.rfind(word + '=', 0) == 0) return std::strtod(one.c_str() + word.size() + 1, nullptr);
    }
  }
  return -1;
}

// Returns the file that counts the scheduling periods of this process's cgroup, or of the nearest cgroup above it that
// limits processors. Empty if there is none.
std::string FileOfCgroup() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    std::string mount;
    const std::size_t path = line.find(':', line.find(':') + 1) + 1;
    if (line.rfind("0::", 0) == 0) mount = "/sys/fs/cgroup";
    if (line.find(":cpu,") != std::string::npos || line.find(":cpu:") != std::string::npos)
      mount = "/sys/fs/cgroup/cpu";
    if (mount.empty()) continue;
    for (std::string folder = line.substr(path);; folder.erase(folder.rfind('/'))) {
      const std::string of_folder = mount + folder + "/cpu.stat";
      if (NumberAfter(of_folder, "nr_periods") > 0) return of_folder;
      if (folder.find('/') == std::string::npos) break;
    }
  }
  return "";
}

// Returns how many seconds of processor time the hypervisor has given to other virtual machines, or -1.
double Stolen() {
  std::ifstream file("/proc/stat");
  std::string name;
  std::array<double, 8> ticks{};  // user, nice, system, idle, iowait, irq, softirq, steal
  if (!(file >> name) || name != "cpu") return -1;
  for (double& one : ticks)
    if (!(file >> one)) return -1;
  return ticks.back() / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

double Share(double before, double after, double whole) {
  if (before < 0 || after < 0) return -1;
  return std::max(0.0, (after - before) / whole);
}

}  // namespace

Machine::Counters Machine::Read() const {
  Counters counters;
  counters.now = ToSeconds(std::chrono::steady_clock::now().time_since_epoch());
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) == 0) counters.used = Seconds(usage.ru_utime) + Seconds(usage.ru_stime);
  counters.stolen = Stolen();
  counters.processors = std::max(1.0, static_cast<double>(sysconf(_SC_NPROCESSORS_ONLN)));
  counters.periods = NumberAfter(cgroup_, "nr_periods");
  counters.throttled = NumberAfter(cgroup_, "nr_throttled");
  const double waited = NumberAfter("/proc/pressure/cpu", "total", "some");
  counters.waited = waited < 0 ? -1 : 1e-6 * waited;
  return counters;
}

MachineSigns Machine::Look() {
  if (!last_) cgroup_ = FileOfCgroup();  // not in the constructor, because most jobs do not watch their steps
  const Counters now = Read();
  MachineSigns signs;
  if (last_ && now.now > last_->now) {
    const double seconds = now.now - last_->now;
    signs.processors = Share(last_->used, now.used, seconds);
    signs.stolen = Share(last_->stolen, now.stolen, seconds * now.processors);
    if (now.periods > last_->periods)
      signs.throttled = Share(last_->throttled, now.throttled, now.periods - last_->periods);
    signs.pressure = Share(last_->waited, now.waited, seconds);
  }
  last_ = now;
  return signs;
}

Neighbour::Neighbour(pid_t number) : process_(static_cast<int>(syscall(kPidfdOpen, number, 0))) {}

void Neighbour::Kill() const {
  if (process_.is_open()) syscall(kPidfdSendSignal, process_.number(), SIGKILL, nullptr, 0);
}

}  // namespace horovod_partial::heartbeat
