#include "recording/recorder.h"

#include <unistd.h>

#include <climits>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace horovod_partial::recording {
namespace {

constexpr auto kInterval = std::chrono::seconds(1);

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

// Returns whether a bucket compares replicas, and has no gradients.
bool IsInternal(const std::string& name) { return name.rfind("horovod_partial.", 0) == 0; }

}  // namespace

Recorder::~Recorder() { End(); }

void Recorder::Begin(const std::string& directory, std::size_t most_bytes) {
  std::lock_guard<std::mutex> life(life_mutex_);
  if (records_) throw std::runtime_error("this rank is being recorded already");
  if (thread_.joinable()) thread_.join();  // the last recording has ended by an error, such as a full disk
  {
    std::lock_guard<std::mutex> lock(mutex_);
    begun_ = Now();
    wall_ = std::chrono::system_clock::now().time_since_epoch();
    ending_ = false;
    AddProcessorTime();
  }
  // Segments calls this function for the first lines of each file: on this thread or the writing one, without `mutex_`.
  segments_ = std::make_unique<Segments>(directory + '/' + NameOfRun(run_), "rank-" + std::to_string(origin_.rank),
                                         most_bytes, [this](int segment) {
                                           std::lock_guard<std::mutex> lock(mutex_);
                                           return Header(segment) + known_buckets_;
                                         });
  process_ = getpid();
  thread_ = std::thread(&Recorder::WriteEverySecond, this);
  records_ = true;
}

void Recorder::Watch(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  watches_ = on;
  if (!on) timer_ = {};  // if the watch begins again, the pause is no step
}

void Recorder::End() {
  records_ = false;
  if (getpid() != process_) return;  // a forked child has no writing thread, and its mutexes may be locked
  std::lock_guard<std::mutex> life(life_mutex_);
  if (!thread_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
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
      AddProcessorTime();
      const std::string lines = TakeLines();
      lock.unlock();
      segments_->Write(lines);
      lock.lock();
    }
  } catch (const std::exception& error) {  // only Write throws, and it is called without `mutex_`
    records_ = false;
    complain_(std::string("the recording has ended: ") + error.what());
  }
}

// Adds how long the main thread has run, and how long it has waited for a processor, if Linux tells.
void Recorder::AddProcessorTime() {
  std::ifstream file("/proc/self/schedstat");  // of the main thread, whichever thread reads it; in nanoseconds
  std::int64_t ran = 0, waited = 0;
  if (file >> ran >> waited) processor_.Add(Micros(Now()), ran / 1000, waited / 1000);
}

// AddProcessorTime, TakeLines, Header, Micros and NumberOf are called with `mutex_` held.
std::string Recorder::TakeLines() {
  const std::string buckets = buckets_.TakeLine();
  known_buckets_ += buckets;
  std::string lines = buckets;
  for (Table* table : {&arrivals_, &results_, &waits_, &handed_, &reductions_, &rounds_, &processor_, &end_})
    lines += table->TakeLine();
  return lines;
}

std::string Recorder::Header(int segment) const {
  std::ostringstream text;
  text << std::fixed << "{\"format\":\"horovod_partial.recording\",\"version\":1,\"run\":" << Quoted(NameOfRun(run_))
       << ",\"rank\":" << origin_.rank << ",\"size\":" << origin_.size << ",\"host\":" << Quoted(HostName())
       << ",\"clock\":" << Quoted(NameOfClock()) << ",\"pid\":" << getpid() << ",\"segment\":" << segment
       << ",\"wall\":" << std::chrono::duration<double>(wall_).count()
       << ",\"steady\":" << std::chrono::duration_cast<std::chrono::microseconds>(begun_).count() << "}\n";
  return text.str();
}

std::int64_t Recorder::Micros(Time time) const {
  return std::chrono::duration_cast<std::chrono::microseconds>(time - begun_).count();
}

std::int64_t Recorder::NumberOf(const BucketLabel& bucket) {
  const auto number = static_cast<std::int64_t>(numbers_.size());
  const auto [found, is_new] = numbers_.emplace(std::pair(bucket.process_set, bucket.name), number);
  if (is_new)
    buckets_.Add(number, bucket.name, bucket.policy, static_cast<std::int64_t>(bucket.process_set),
                 static_cast<std::int64_t>(bucket.bytes));
  return found->second;
}

StepReport Recorder::TakeSteps() {
  std::lock_guard<std::mutex> lock(mutex_);
  return timer_.Take();
}

void Recorder::Arrived(const BucketLabel& bucket, Time time) {
  if (!on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const std::int64_t number = NumberOf(bucket);
  const std::int64_t step = arrival_steps_.Count({std::to_string(number)});
  if (watches_ && !IsInternal(bucket.name)) timer_.Arrived(step, time, bucket.bytes);
  if (records_) arrivals_.Add(step, number, Micros(time));
}

void Recorder::Got(const BucketLabel& bucket, Time time, const Result& result) {
  if (!on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (watches_ && !IsInternal(bucket.name)) timer_.Got(time);
  if (records_)
    results_.Add(NumberOf(bucket), Micros(time), result.round, std::int64_t{result.late},
                 std::int64_t{result.staleness}, std::int64_t{result.fresh}, std::int64_t{result.gradients});
}

void Recorder::Waited(const BucketLabel& bucket, Time begin, Time end) {
  if (!on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (watches_) timer_.Waited(begin, end, true);
  if (records_) waits_.Add(NumberOf(bucket), Micros(begin), Micros(end));
}

void Recorder::WaitedForHorovod(Time begin, Time end) {
  if (!on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (watches_) timer_.Waited(begin, end, false);
  if (records_) waits_.Add(std::int64_t{-1}, Micros(begin), Micros(end));
}

void Recorder::Handed(Time time, std::int64_t tensors) {
  if (!on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (watches_) timer_.Handed(time);
  if (records_) handed_.Add(Micros(time), tensors);
}

void Recorder::Reduced(const Reduction& reduction) {
  if (!on()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  const std::int64_t step = reduction.names == nullptr ? -1 : reduction_steps_.Count(*reduction.names);
  if (watches_ && step >= 0)
    timer_.Reduced(step, reduction.begin, reduction.end, static_cast<std::size_t>(reduction.bytes));
  if (records_)
    reductions_.Add(reduction.sequence, std::int64_t{reduction.process_set}, step, Micros(reduction.begin),
                    Micros(reduction.end), reduction.tensors, reduction.bytes, std::int64_t{reduction.everyone});
}

void Recorder::Decided(const BucketLabel& bucket, const DecidedRound& round) {
  if (!records_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  rounds_.Add(NumberOf(bucket), round.round, Micros(round.time), round.reason, std::int64_t{round.quorum},
              std::int64_t{round.gradients}, round.missing, round.delivered);
}

}  // namespace horovod_partial::recording
