#include "recording/recorder.h"

#include <linux/tcp.h>  // <netinet/tcp.h> lacks some counters of connections
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <system_error>

namespace horovod_partial::recording {
namespace {

constexpr auto kInterval = std::chrono::seconds(1);
constexpr std::int64_t kLeastCarried = 1'000'000;  // a link gets a new row when it has carried so many more bytes

Time Now() { return std::chrono::steady_clock::now().time_since_epoch(); }

// Returns the name of the run's folder: the number of the run as a date and time in UTC.
std::string NameOfRun(std::int64_t milliseconds) {
  const std::time_t seconds = milliseconds / 1000;
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[32];
  const std::size_t length = std::strftime(text, sizeof text, "%Y%m%dT%H%M%S", &parts);
  std::snprintf(text + length, sizeof text - length, ".%03dZ", static_cast<int>(milliseconds % 1000));
  return text;
}

std::string HostName() {
  char name[HOST_NAME_MAX + 1] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

// Returns a name for this machine's monotonic clock. All processes that share the clock get the same name.
std::string NameOfClock() {
  std::string name;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), name);
  return name.empty() ? HostName() : name;
}

// Returns the address of one end of a connection as text. `end` is getsockname or getpeername.
std::string AddressOf(int number, decltype(&getsockname) end) {
  sockaddr_storage address{};
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  char text[NI_MAXHOST] = {};
  if (end(number, any, &length) == 0) getnameinfo(any, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

// Returns true for a bucket in which ranks compare their replicas: it has no gradients.
bool IsInternal(const std::string& name) { return name.rfind("horovod_partial.", 0) == 0; }

// Under work sharing, returns the optimizer of a bucket: the bucket's name without its number. Otherwise returns "".
std::string OptimizerOf(const BucketLabel& bucket) {
  return bucket.policy.rfind("WorkSharing()", 0) == 0 ? bucket.name.substr(0, bucket.name.rfind('.')) : "";
}

}  // namespace

void Recorder::Begin(const std::string& directory, std::size_t most_bytes) {
  std::lock_guard<std::mutex> life(life_mutex_);
  if (records_) throw std::runtime_error("this rank is being recorded already");
  if (thread_.joinable()) thread_.join();  // the last recording has ended by an error, such as a full disk
  {
    std::lock_guard<std::mutex> lock(mutex_);
    begun_ = Now();
    wall_ = std::chrono::system_clock::now().time_since_epoch();
    ending_ = false;
  }
  AddProcessorTime();
  // Segments calls this function for the first lines of each file, on this or the writing thread, without `mutex_`.
  segments_ = std::make_unique<Segments>(directory + '/' + NameOfRun(run_), "rank-" + std::to_string(rank_), most_bytes,
                                         [this](int segment) {
                                           std::lock_guard<std::mutex> lock(mutex_);
                                           return Header(segment) + known_buckets_;
                                         });
  process_ = getpid();
  thread_ = std::thread(&Recorder::WriteEverySecond, this);
  records_ = true;
}

void Recorder::Watch(bool on) {
  if (watches_ == on) return;
  if (!records_) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [optimizer, timer] : timers_) timer.Flush();  // the time before this watch belongs to no step
  }
  TakeSteps();  // discards the steps before the watch
  watches_ = on;
}

void Recorder::End() {
  if (getpid() != process_) {  // a forked child has no writing thread, and its mutexes may be locked
    records_ = false;
    return;
  }
  std::lock_guard<std::mutex> life(life_mutex_);
  if (!thread_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
    for (auto& [optimizer, timer] : timers_) timer.Flush();
    records_ = false;
    end_.Add(Micros(Now()));
    ends_.notify_all();
  }
  thread_.join();
  segments_.reset();
}

void Recorder::WriteEverySecond() {
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    for (bool more = true; more;) {
      more = !ends_.wait_for(lock, kInterval, [this] { return ending_; });
      lock.unlock();
      AddProcessorTime();
      lock.lock();
      const std::string lines = TakeLines();
      lock.unlock();
      segments_->Write(lines + LineOfLinks());
      lock.lock();
    }
  } catch (const std::exception& error) {  // `mutex_` is not held where something throws
    records_ = false;
    complain_(std::string("the recording has ended: ") + error.what());
  }
}

// Adds for how long the threads of this process have run, and for how long they have waited for a processor, if Linux
// tells. Horovod's background thread does not count. With some libraries it polls, and so it waits for a processor
// although the rank has nothing to do. Reading takes about 10 us for each thread, so the caller must not hold `mutex_`.
void Recorder::AddProcessorTime() {
  const std::string polling = std::to_string(polling_);
  std::map<std::string, ProcessorTime> threads;
  std::error_code none;
  std::filesystem::directory_iterator thread("/proc/self/task", none);
  if (none) return;  // for example because the process has no descriptor left
  for (; thread != std::filesystem::directory_iterator(); thread.increment(none)) {
    const std::string number = thread->path().filename().string();
    std::ifstream file(thread->path() / "schedstat");
    ProcessorTime now;
    if (number == polling) continue;
    if (!(file >> now.ran >> now.waited)) {  // if it can be read later, its time must not count twice
      if (const auto known = threads_.find(number); known != threads_.end()) threads.insert(*known);
      continue;
    }
    ProcessorTime& before = threads_[number];
    if (now.ran < before.ran) before = {};  // the thread has ended, and another one has its number
    processor_time_.ran += now.ran - before.ran;
    processor_time_.waited += now.waited - before.waited;
    threads[number] = now;
  }
  threads_ = std::move(threads);
  if (threads_.empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  processor_.Add(Micros(Now()), processor_time_.ran / 1000, processor_time_.waited / 1000);
}

// Returns how fast the connection to each other host is that has carried most, if it has carried much since its last
// row. The writing thread calls this without `mutex_`, because many connections take a while.
std::string Recorder::LineOfLinks() {
  std::map<std::pair<std::string, std::string>, std::pair<std::int64_t, std::int64_t>> links;  // bytes, and the rate
  std::error_code error;
  for (std::filesystem::directory_iterator file("/proc/self/fd", error), last; file != last; file.increment(error)) {
    const int number = std::atoi(file->path().filename().c_str());
    tcp_info info{};
    socklen_t length = sizeof info;
    if (getsockopt(number, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;  // this file is no TCP socket
    const std::pair carried(static_cast<std::int64_t>(info.tcpi_bytes_acked),
                            static_cast<std::int64_t>(info.tcpi_delivery_rate));
    const std::pair ends(AddressOf(number, getsockname), AddressOf(number, getpeername));
    if (ends.second.empty()) continue;  // the connection has ended
    auto& link = links[ends];
    link = std::max(link, carried);
  }
  for (const auto& [ends, carried] : links) {
    if (ends.first == ends.second) continue;
    std::int64_t& told = told_[ends];
    if (carried.first < told) told = 0;  // the connection of the last row has ended
    if (carried.first < told + kLeastCarried) continue;
    told = carried.first;
    links_.Add(Micros(Now()), ends.first, ends.second, carried.first, carried.second);
  }
  return links_.TakeLine();
}

// TakeLines, TimerOf, AddStep, Header, Micros and NumberOf are called with `mutex_` held.
std::string Recorder::TakeLines() {
  const std::string buckets = buckets_.TakeLine();
  known_buckets_ += buckets;
  std::string lines = buckets;
  for (Table* table : {&steps_, &waits_, &reductions_, &rounds_, &processor_, &end_}) lines += table->TakeLine();
  return lines;
}

std::string Recorder::Header(int segment) const {
  std::ostringstream text;
  text << std::fixed << "{\"format\":\"horovod_partial.recording\",\"version\":2,\"run\":" << Quoted(NameOfRun(run_))
       << ",\"rank\":" << rank_ << ",\"size\":" << size_ << ",\"host\":" << Quoted(HostName())
       << ",\"clock\":" << Quoted(NameOfClock()) << ",\"pid\":" << getpid() << ",\"segment\":" << segment
       << ",\"wall\":" << ToSeconds(wall_)
       << ",\"steady\":" << std::chrono::duration_cast<std::chrono::microseconds>(begun_).count() << "}\n";
  return text.str();
}

std::int64_t Recorder::Micros(Time time) const {
  return std::chrono::duration_cast<std::chrono::microseconds>(time - begun_).count();
}

std::int64_t Recorder::NumberOf(const BucketLabel& bucket) {
  const auto number = static_cast<std::int64_t>(numbers_.size());
  const auto [found, is_new] = numbers_.emplace(std::pair(bucket.process_set, bucket.name), number);
  if (is_new) buckets_.Add(number, bucket.name, bucket.policy, bucket.process_set, bucket.bytes);
  return found->second;
}

StepReport Recorder::TakeSteps() {
  std::lock_guard<std::mutex> lock(mutex_);
  StepReport report;  // the steps of the timer with the most bytes, and the bytes of all timers
  std::size_t most = 0;
  std::int64_t bytes = 0;
  for (auto& [optimizer, timer] : timers_) {
    StepReport taken = timer.Take();
    bytes += taken.bytes;
    if (timer.bytes() <= most) continue;
    most = timer.bytes();
    report = std::move(taken);
  }
  report.bytes = bytes;
  return report;
}

StepTimer& Recorder::TimerOf(const std::optional<std::string>& optimizer) {
  return timers_.try_emplace(optimizer, [this](const Step& step) { AddStep(step); }).first->second;
}

void Recorder::AddStep(const Step& step) {
  const auto micros = [](Time time) { return std::chrono::duration_cast<std::chrono::microseconds>(time).count(); };
  const auto part = [&step](Part of) { return step.parts[of] < 0 ? -1 : std::llround(1e6 * step.parts[of]); };
  if (records_)
    steps_.Add(step.bucket, step.number, step.begin >= begun_ ? Micros(*step.begin) : -1, Micros(step.handed),
               Micros(step.result), micros(step.blocked), micros(step.reduced), step.round, step.late, step.staleness,
               step.bytes, part(Part::kLoader), part(Part::kForward), part(Part::kBackward), part(Part::kOptimizer),
               part(Part::kOther));
}

void Recorder::Arrived(const BucketLabel& bucket, Time time) {
  if (!on() || IsInternal(bucket.name)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const std::int64_t number = NumberOf(bucket);
  TimerOf(OptimizerOf(bucket)).Arrived({std::to_string(number)}, number, time, bucket.bytes);
}

void Recorder::Got(const BucketLabel& bucket, Time time, Round round, bool late, int staleness) {
  if (!on() || IsInternal(bucket.name)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  TimerOf(OptimizerOf(bucket)).Got(NumberOf(bucket), time, round, late, staleness);
}

void Recorder::Waited(Time begin, Time end, bool for_round) {
  if (!on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [optimizer, timer] : timers_) timer.Waited(begin, end, for_round && optimizer);
  if (records_ && !for_round) waits_.Add(Micros(begin), Micros(end));
}

void Recorder::Handed(Time time) {
  std::lock_guard<std::mutex> lock(mutex_);
  seen_ = time;
  TimerOf(std::nullopt).Handed(time);
}

void Recorder::Marked(const Mark& mark) {
  if (!on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [optimizer, timer] : timers_) timer.Marked(mark);
}

void Recorder::Reduced(const Reduction& reduction) {
  if (!on()) return;
  polling_ = syscall(SYS_gettid);  // only Horovod's background thread calls this function
  std::lock_guard<std::mutex> lock(mutex_);
  if (reduction.names != nullptr) {  // for the timer, these tensors arrived at `seen_`, and their result comes now
    StepTimer& timer = TimerOf(std::nullopt);
    timer.Arrived(*reduction.names, -1, seen_, static_cast<std::size_t>(reduction.bytes));
    timer.Got(-1, reduction.end, -1, false, 0);
  }
  for (auto& [optimizer, timer] : timers_) timer.Reduced(reduction.begin, reduction.end);
  if (records_) reductions_.Add(reduction.sequence, reduction.process_set, Micros(reduction.end), reduction.everyone);
}

void Recorder::Decided(const BucketLabel& bucket, const Closing& closing, int quorum, Time time) {
  if (!records_) return;
  Members missing, delivered;
  for (std::size_t rank = 0; rank < closing.contributions.size(); ++rank) {
    const auto& contribution = closing.contributions[rank];
    if (contribution.fresh) continue;
    missing.push_back(static_cast<Rank>(rank));
    if (contribution.gradients > 0) delivered.push_back(static_cast<Rank>(rank));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  rounds_.Add(NumberOf(bucket), closing.round, Micros(time), std::string(NameOf(closing.reason)), quorum,
              closing.gradients(), missing, delivered);
}

}  // namespace horovod_partial::recording
