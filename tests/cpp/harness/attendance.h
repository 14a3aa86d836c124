// Where a rank of a simulated job can come: the answers of the real PossibleArrivals, which belong to real threads.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "core/rounds/message.h"
#include "core/values/types.h"
#include "engine/possible_arrivals.h"
#include "harness/program.h"
#include "harness/worker.h"

namespace horovod_partial::test {

// One rank at one time: all that the answer depends on, as long as no bucket has more rounds than PossibleArrivals
// remembers.
struct Attending {
  struct Thread {
    enum class Does : std::uint8_t { kRun, kWait, kFlush, kEnd, kPark };
    Does does = Does::kRun;
    std::uint8_t at = 0;      // in its program
    std::uint8_t bucket = 0;  // kWait: for this one
    bool long_enough = true;  // kWait, kPark: to count
    auto Fields() const { return std::tie(does, at, bucket, long_enough); }
    bool operator<(const Thread& other) const { return Fields() < other.Fields(); }
  };
  std::array<Thread, kMostThreads> threads;
  int open = 0;         // a bit for each bucket where something has arrived, and whose round has not begun
  bool silent = false;  // nothing has arrived or been collected for so long that the process is asked as a whole
  bool operator<(const Attending& other) const {
    return std::tie(threads, open, silent) < std::tie(other.threads, other.open, other.silent);
  }
};

// A simulated job has one thread and no clock, and PossibleArrivals wants both. So for each question that is new,
// threads do what those of the rank have done, and wait as those do; the answer is kept.
class Attendance {
 public:
  // What a rank says.
  struct Answer {
    BucketSet absent;
    BucketSet waiting;
    bool blocked = false;
    bool operator==(const Answer& other) const {
      return absent == other.absent && waiting == other.waiting && blocked == other.blocked;
    }
  };

  explicit Attendance(std::vector<Process> processes) : processes_(std::move(processes)), known_(processes_.size()) {}

  // The number of the answer; 0 is that of a rank that can come everywhere.
  int Ask(Rank rank, const Attending& question) {
    auto& known = known_[static_cast<std::size_t>(rank)];
    const auto found = known.find(question);
    if (found != known.end()) return found->second;
    return known[question] = NumberOf(Look(processes_[static_cast<std::size_t>(rank)], question));
  }
  int NumberOf(const Answer& answer) {
    const auto found = std::find(answers_.begin(), answers_.end(), answer);
    if (found != answers_.end()) return static_cast<int>(found - answers_.begin());
    answers_.push_back(answer);
    return static_cast<int>(answers_.size() - 1);
  }
  const Answer& answer(int number) const { return answers_[static_cast<std::size_t>(number)]; }

 private:
  static Answer Look(const Process& process, const Attending& question) {
    using Does = Attending::Thread::Does;
    const void* const engine = &process;
    const Time before = std::chrono::seconds(1);
    const Time now = before + std::chrono::milliseconds(question.silent ? 20000 : 200);
    std::vector<std::unique_ptr<Worker>> workers;
    const auto arrivals = std::make_shared<PossibleArrivals>();
    std::array<std::unique_ptr<PossibleArrivals::Bucket>, kMostBuckets> buckets;
    const auto use = [&](int bucket) -> PossibleArrivals::Bucket& {
      auto& used = buckets[static_cast<std::size_t>(bucket)];
      if (used == nullptr) used = std::make_unique<PossibleArrivals::Bucket>(arrivals, engine, NameOf(bucket));
      return *used;
    };
    for (std::size_t t = 0; t < process.size(); ++t) {
      workers.push_back(std::make_unique<Worker>());
      workers[t]->Do([&, t] {
        for (std::size_t i = 0; i < question.threads[t].at; ++i) {
          const Op& op = process[t][i];
          if (op.kind == Op::Kind::kArrive) use(op.bucket).Arrive({}, 0, before);
          if (op.kind == Op::Kind::kWait) use(op.bucket).EndWait(true, 0, before);
        }
      });
    }
    for (int b = 0; b < kMostBuckets; ++b)
      if ((question.open >> b & 1) != 0) use(b).SetOpen(true, before);
    std::vector<std::unique_ptr<PossibleArrivals::ForeignWait>> parked;
    auto flush = Does::kRun;
    for (std::size_t t = 0; t < process.size(); ++t) {
      const Attending::Thread& thread = question.threads[t];
      const Time since = thread.long_enough ? before : now;
      switch (thread.does) {
        case Does::kRun:
          if (t > 0 && thread.at == process[t].size()) workers[t].reset();
          break;
        case Does::kWait: workers[t]->Do([&] { use(thread.bucket).BeginWait(since); }); break;
        case Does::kFlush:
        case Does::kEnd:
          flush = thread.does;
          workers[t]->Do([&] { arrivals->BeginFlush(engine, since); });
          break;
        case Does::kPark:
          workers[t]->Do([&] { parked.push_back(std::make_unique<PossibleArrivals::ForeignWait>(arrivals, since)); });
          break;
      }
    }
    const PossibleArrivals::Away away = arrivals->Look(engine, now, {}, flush != Does::kRun, {});
    // What the engine adds, whatever its threads do.
    return {flush == Does::kEnd ? BucketSet{true, {}} : away.absent, away.waiting, away.blocked};
  }

  std::vector<Process> processes_;
  std::vector<std::map<Attending, int>> known_;
  std::vector<Answer> answers_{{}};
};

}  // namespace horovod_partial::test
