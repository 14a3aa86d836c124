// Records what one rank saw, and when, so that a slow rank can be found. docs/slow-ranks.md has the format.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/rounds/message.h"
#include "core/slowness/step_timer.h"
#include "core/values/types.h"
#include "recording/segments.h"
#include "recording/table.h"

namespace horovod_partial::recording {

// What a recording says of a bucket.
struct BucketLabel {
  int process_set;
  const std::string& name;
  const std::string& policy;
  std::size_t bytes;
};

// What a recording says of an allreduce.
struct Reduction {
  std::int64_t sequence;
  int process_set;
  const std::vector<std::string>* names;  // tensor names if this is a training allreduce of Horovod's own, else null
  Time begin;
  Time end;
  std::int64_t bytes;
  bool everyone;  // true if all ranks of the process set reduced together
};

// Notes what one rank does between hvd.init() and hvd.shutdown(). Threads of the application and of Horovod call the
// recorder. Timers turn the notes into steps. The steps go to a recording on disk, to hvd.watch(), or to both. If
// neither is on, calls return at once. Otherwise they take a lock. A thread writes to disk once a second.
class Recorder : private NonCopyable {
 public:
  // Records `rank`, of `size` ranks. If a recording ends early, the thread that writes it calls `complain` with the
  // reason.
  Recorder(Rank rank, int size, std::function<void(const std::string&)> complain)
      : rank_(rank), size_(size), complain_(std::move(complain)) {}
  ~Recorder() { End(); }

  // Sets the number of the run: a Unix time in milliseconds, the same on all ranks. Must be called before Begin.
  void SetRun(std::int64_t milliseconds) { run_ = milliseconds; }

  // Records everything from now on, in a folder for this run below `directory`, in at most `most_bytes`. Throws
  // std::runtime_error if it cannot write there, or if it records already.
  void Begin(const std::string& directory, std::size_t most_bytes);
  // Writes what has not been written yet, and ends the recording. Writes nothing in a forked child.
  void End();
  // Begins or ends the watch: while it is on, TakeSteps returns the compute times of steps.
  void Watch(bool on);
  // Returns the steps of the rank that have ended since the last call.
  StepReport TakeSteps();
  bool records() const { return records_; }
  bool watches() const { return watches_; }
  bool on() const { return records_ || watches_; }

  void Arrived(const BucketLabel& bucket, Time time);
  void Got(const BucketLabel& bucket, Time time, Round round, bool late, int staleness);
  // Records that the application was blocked: for a round, or (`for_round` is false) for an operation of Horovod's own.
  void Waited(Time begin, Time end, bool for_round);
  // Records that Horovod's cycle has seen new tensors of Horovod's own operations.
  void Handed(Time time);
  // Records that the program has asked for a batch, or that its optimizer has ended a step.
  void Marked(const Mark& mark);
  void Reduced(const Reduction& reduction);
  // Records that the coordinator has closed a round. `quorum`: how many ranks the policy asks for.
  void Decided(const BucketLabel& bucket, const Closing& closing, int quorum, Time time);

 private:
  // How long threads have run, and how long they have waited for a processor, in nanoseconds.
  struct ProcessorTime {
    std::int64_t ran = 0;
    std::int64_t waited = 0;
  };

  std::int64_t Micros(Time time) const;
  std::int64_t NumberOf(const BucketLabel& bucket);
  std::string Header(int segment) const;
  std::string TakeLines();
  StepTimer& TimerOf(const std::optional<std::string>& optimizer);
  void AddStep(const Step& step);
  void AddProcessorTime();
  std::string LineOfLinks();
  void WriteEverySecond();

  const Rank rank_;
  const int size_;
  const std::function<void(const std::string&)> complain_;
  std::int64_t run_ = 0;
  std::atomic<bool> records_{false};
  std::atomic<bool> watches_{false};
  std::atomic<long> polling_{0};  // the number of Horovod's background thread; 0 before the first reduction

  std::mutex life_mutex_;  // this mutex guards the members below: one thread at a time begins or ends a recording
  std::thread thread_;
  std::atomic<pid_t> process_{0};  // the process in which the writing thread runs
  // While `thread_` runs, only that thread uses these members.
  std::unique_ptr<Segments> segments_;            // the recording's files
  std::map<std::string, ProcessorTime> threads_;  // each thread of the process, as last read, by its number
  ProcessorTime processor_time_;                  // the sum over all threads, also those that have ended
  Table links_{"links", {"time", "from", "to", "bytes", "rate"}};
  std::map<std::pair<std::string, std::string>, std::int64_t> told_;  // the bytes in the last row of each link

  std::mutex mutex_;  // guards the members below; may be taken under a bucket's lock, and no lock may be taken under it
  std::condition_variable ends_;
  bool ending_ = false;
  Time begun_{0};
  Time wall_{0};                                                 // the Unix time when the recording began
  std::map<std::pair<int, std::string>, std::int64_t> numbers_;  // the number of each bucket, by process set and name
  std::string known_buckets_;  // the lines of the table of buckets so far; each new file repeats them
  // A timer for each optimizer under work sharing (by its name), a timer for all other buckets (by ""), and a timer for
  // Horovod's own reductions (without a name).
  std::map<std::optional<std::string>, StepTimer> timers_;
  Time seen_{0};  // when Horovod's cycle last saw tensors of its own reductions
  Table buckets_{"buckets", {"bucket", "name", "policy", "process_set", "bytes"}};
  Table steps_{"steps",
               {"bucket", "step", "begin", "handed", "result", "blocked", "reduced", "round", "late", "staleness",
                "bytes", "loader", "forward", "backward", "optimizer", "other"}};
  Table waits_{"waits", {"begin", "end"}};
  Table reductions_{"reductions", {"sequence", "process_set", "end", "everyone"}};
  Table rounds_{"rounds", {"bucket", "round", "time", "reason", "quorum", "gradients", "missing", "delivered"}};
  Table processor_{"processor", {"time", "ran", "waited"}};
  Table end_{"end", {"time"}};
};

}  // namespace horovod_partial::recording
