// Records what one rank saw, and when, so that a slow rank can be found. docs/slow-ranks.md has the format.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/groups/groups.h"
#include "core/slowness/step_timer.h"
#include "core/values/types.h"
#include "recording/segments.h"
#include "recording/table.h"

namespace horovod_partial::recording {

// A tensor name that comes again begins the next step. Not thread-safe.
class StepCounter {
 public:
  // Returns the number of the step, from 0, in which all tensors of these names are reduced.
  std::int64_t Count(const std::vector<std::string>& names) {
    std::vector<std::size_t> hashes;  // if two names have one hash, a step begins too early, but nothing worse happens
    for (const std::string& name : names) hashes.push_back(std::hash<std::string>{}(name));
    const bool is_full = seen_.size() >= kMostNames;
    if (is_full ||
        std::any_of(hashes.begin(), hashes.end(), [this](std::size_t hash) { return seen_.count(hash) > 0; })) {
      seen_.clear();
      ++step_;
    }
    seen_.insert(hashes.begin(), hashes.end());
    return step_;
  }

 private:
  // The largest number of names in a step. It bounds the memory if a program gives each operation a new name.
  static constexpr std::size_t kMostNames = 1 << 20;
  std::unordered_set<std::size_t> seen_;
  std::int64_t step_ = 0;
};

// What a recording says of a bucket.
struct BucketLabel {
  int process_set;
  const std::string& name;
  const std::string& policy;
  std::size_t bytes;
};

// What a recording says of the result of a round.
struct Result {
  Round round;
  bool late;
  int staleness;
  int fresh;
  int gradients;
};

// What a recording says of an allreduce.
struct Reduction {
  std::int64_t sequence;
  int process_set;
  const std::vector<std::string>* names;  // tensor names if this is a training allreduce of Horovod's own, else null
  Time begin;
  Time end;
  std::int64_t tensors;
  std::int64_t bytes;
  bool everyone;  // true if all ranks of the process set reduced together
};

// What a recording says of a round that the coordinator has closed.
struct DecidedRound {
  Round round;
  Time time;
  std::string reason;
  int quorum;
  int gradients;
  Members missing;
  Members delivered;
};

// Notes what one rank does in one generation of Horovod. Threads of the application and of Horovod call it. What it
// notes goes to a recording, to the timer of steps, or to both; if neither is on, a call returns at once. For a
// recording, a call takes a lock and adds some digits to a text in memory, and a separate thread writes to disk once a
// second.
class Recorder {
 public:
  // Which rank is recorded, of how many ranks.
  struct Origin {
    Rank rank;
    int size;
  };

  // If a recording ends early, the thread that writes it calls `complain` with the reason.
  Recorder(Origin origin, std::function<void(const std::string&)> complain)
      : origin_(origin), complain_(std::move(complain)) {}
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Sets the number of the run: a Unix time in milliseconds, the same on all ranks. To be called before Begin.
  void SetRun(std::int64_t milliseconds) { run_ = milliseconds; }

  // Records everything from now on, in a folder for this run below `directory`, in at most `most_bytes`. Throws
  // std::runtime_error if it cannot write there, or if it records already.
  void Begin(const std::string& directory, std::size_t most_bytes);
  // Writes what has not been written yet, and ends the recording. Writes nothing in a forked child.
  void End();
  // Times the steps of the training from now on, or not any more.
  void Watch(bool on);
  // Returns what the rank's steps were since the last call.
  StepReport TakeSteps();
  bool records() const { return records_; }
  bool watches() const { return watches_; }
  bool on() const { return records_ || watches_; }

  void Arrived(const BucketLabel& bucket, Time time);
  void Got(const BucketLabel& bucket, Time time, const Result& result);
  void Waited(const BucketLabel& bucket, Time begin, Time end);
  // Records a wait for an operation of Horovod's own.
  void WaitedForHorovod(Time begin, Time end);
  void Handed(Time time, std::int64_t tensors);
  void Reduced(const Reduction& reduction);
  void Decided(const BucketLabel& bucket, const DecidedRound& round);

 private:
  std::int64_t Micros(Time time) const;
  std::int64_t NumberOf(const BucketLabel& bucket);
  std::string Header(int segment) const;
  std::string TakeLines();
  void AddProcessorTime();
  void WriteEverySecond();

  const Origin origin_;
  const std::function<void(const std::string&)> complain_;
  std::int64_t run_ = 0;
  std::atomic<bool> records_{false};
  std::atomic<bool> watches_{false};

  std::mutex life_mutex_;  // this mutex guards the members below: one thread at a time begins or ends a recording
  std::thread thread_;
  std::atomic<pid_t> process_{0};       // the process in which the writing thread runs
  std::unique_ptr<Segments> segments_;  // the recording's files; while `thread_` runs, only it uses them

  std::mutex mutex_;  // guards the members below; may be taken under a bucket's lock, and no lock may be taken under it
  std::condition_variable ends_;
  bool ending_ = false;
  Time begun_{0};
  Time wall_{0};                                                 // the Unix time when the recording began
  std::map<std::pair<int, std::string>, std::int64_t> numbers_;  // the number of each bucket, by process set and name
  std::string known_buckets_;  // the lines of the table of buckets so far; each new file repeats them
  StepTimer timer_;
  StepCounter arrival_steps_;
  StepCounter reduction_steps_;
  Table buckets_{"buckets", {"bucket", "name", "policy", "process_set", "bytes"}};
  Table arrivals_{"arrivals", {"step", "bucket", "time"}};
  Table results_{"results", {"bucket", "time", "round", "late", "staleness", "fresh", "gradients"}};
  Table waits_{"waits", {"bucket", "begin", "end"}};
  Table handed_{"handed", {"time", "tensors"}};
  Table reductions_{"reductions", {"sequence", "process_set", "step", "begin", "end", "tensors", "bytes", "everyone"}};
  Table rounds_{"rounds", {"bucket", "round", "time", "reason", "quorum", "gradients", "missing", "delivered"}};
  Table processor_{"processor", {"time", "ran", "waited"}};
  Table end_{"end", {"time"}};
};

}  // namespace horovod_partial::recording
