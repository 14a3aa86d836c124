// A make-believe Horovod for the engine: all ranks in one process, and of Horovod only what the protocol depends on.
//
// As in Horovod, each rank has a tensor table; a cycle negotiates if any rank asks for it; the coordinator's entries
// are made before the responses are known, the others' after; a response may carry several tensors; entries are called
// back under no lock at the end of a reduction, and under the queue's lock in a shutdown. The hooks do what
// attach/session.cc makes them do: each group of a round reduces by itself, and a rank that is in none has an entry of
// no bytes, of which nobody calls back.
//
// The background can be driven in two ways: Cycle takes all steps of all ranks in the caller's thread, in a random
// order, and lets the caller do something between any two of them; Start makes one thread for each rank.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/rounds/coordinator.h"
#include "core/values/bytes.h"
#include "engine/engine.h"
#include "harness/fake_device.h"

// Horovod's shutdown calls back under its queue's lock, and then takes the bucket's; a submission takes them the other
// way round. That is no deadlock: a bucket that is called back has an entry in the table, so nobody can be submitting
// it. The sanitizer knows nothing of the table and would report the cycle of locks.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "detect_deadlocks=0"; }

namespace horovod_partial::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

using Random = std::mt19937_64;

// Up to and without `end`.
inline int Below(Random& random, int end) { return std::uniform_int_distribution<int>(0, end - 1)(random); }

// A round that has run, as nobody but the background knows it.
struct PastRound {
  Closing closing;
  std::vector<const void*> inputs;  // by rank: what the transport read, and wrote
  std::vector<void*> outputs;
  std::vector<std::vector<char>> sent;     // by rank
  std::vector<std::vector<char>> results;  // by rank; empty if it failed, or the rank is in no group
};

// Waits until every rank that has not joined flushes, or until all have ended.
inline void WaitForFlush(Engine& engine) { Engine::Flushing(engine, Flush::Kind::kFlushing, {}).Wait(); }
inline void WaitForEnd(Engine& engine) { Engine::Flushing(engine, Flush::Kind::kEnding, {}).Wait(); }

class FakeHorovod {
 public:
  struct Settings {
    int size = 3;
    // Nobody is ever silent, or a slow machine would change what is decided.
    Engine::Thresholds thresholds{Time(0), Time(0), std::chrono::hours(1000)};
    std::size_t fused = 1;  // tensors in a response, at most; 0: a random number
    // What time it is for an engine's hooks, and for the coordinator.
    std::function<Time(Rank)> clock = [](Rank) { return Now(); };
    std::function<Time()> coordinator_clock = [] { return Now(); };
    // What an entry is called back with instead of its result, or "".
    std::function<std::string(const Closing&, Rank)> fault = [](const Closing&, Rank) { return std::string(); };
    // After how many cycles an entry is called back: a device reduces behind the cycles.
    std::function<int(Rank)> device_cycles = [](Rank) { return 0; };
    // Entries are called back by a thread of their own, as those of NCCL are, whatever the cycles do.
    bool finalizer = false;
    // Where a rank's tensors lie.
    std::function<Memory&(Rank)> memory = [](Rank) -> Memory& { return Memory::Host(); };
  };

  explicit FakeHorovod(Settings settings) : settings_(std::move(settings)), coordinator_(settings_.size) {
    for (Rank rank = 0; rank < settings_.size; ++rank)
      ranks_.push_back(std::make_unique<RankState>(*this, rank, settings_.size, settings_.thresholds));
  }
  ~FakeHorovod() { Stop(); }

  int size() const { return settings_.size; }
  Engine& engine(Rank rank) { return ranks_[Index(rank)]->engine; }
  Memory& memory(Rank rank) const { return settings_.memory(rank); }

  // --- Application's threads

  // Horovod's join, without waiting for the others.
  void Join(Rank rank) { ranks_[Index(rank)]->wants_join = true; }
  bool IsJoining(Rank rank) const { return ranks_[Index(rank)]->wants_join || ranks_[Index(rank)]->joined; }
  // A collective that is not ours, such as a barrier: is there until every rank has submitted one. The calling thread
  // waits for it as long as it keeps what this returns.
  std::unique_ptr<PossibleArrivals::ForeignWait> SubmitForeign(Rank rank) {
    RankState& state = *ranks_[Index(rank)];
    state.foreign_since = Now();
    state.foreign = true;
    return std::make_unique<PossibleArrivals::ForeignWait>(state.arrivals, Now());
  }
  bool IsForeignOutstanding(Rank rank) const { return ranks_[Index(rank)]->foreign; }
  void Shutdown() { shutdown_ = true; }
  bool IsAlive(Rank rank) const { return ranks_[Index(rank)]->alive; }

  // --- Background, in one thread

  // False after the shutdown.
  bool Cycle(Random& random, const std::function<void()>& between) {
    const auto each_rank = [&](const auto& step) {
      std::vector<Rank> order(ranks_.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (const Rank rank : order) {
        between();
        step(rank);
      }
    };
    each_rank([&](Rank rank) { Pop(rank); });
    Agree();
    if (ends_) each_rank([&](Rank rank) { Finalize(rank); });
    if (ends_ || !negotiates_) return !ends_;
    each_rank([&](Rank rank) {
      if (rank != 0) MakeReport(rank);
    });
    between();
    Coordinate(random, between);
    each_rank([&](Rank rank) { Receive(rank); });
    for (std::size_t i = 0; i < responses_.size(); ++i) {
      each_rank([&](Rank rank) { Gather(rank, i); });
      each_rank([&](Rank rank) { Reduce(rank, i); });
      each_rank([&](Rank rank) { Callback(rank, i); });
    }
    return true;
  }

  // --- Background, in one thread for each rank

  void Start() {
    for (Rank rank = 0; rank < size(); ++rank) threads_.emplace_back([this, rank] { Run(rank); });
  }
  // Shuts down, and waits for the threads.
  void Stop() {
    shutdown_ = true;
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

  // --- When the background rests

  const std::vector<PastRound>& history() const { return history_; }
  // How often something has happened that wakes up the applications' threads, such as a callback.
  std::size_t wake_ups() const { return wake_ups_; }
  void CountWakeUp() { ++wake_ups_; }
  // For messages: what the ranks say, and what they wait for.
  std::string Describe() const {
    std::string text = coordinator_.DescribeWaits(kNever, false);
    for (const auto& state : ranks_) {
      text += "\nrank " + std::to_string(state->rank) + ": absent " + Describe(state->report.absent) + " waiting " +
              Describe(state->report.waiting) + " flush " + std::to_string(static_cast<int>(state->report.flush)) +
              (state->joined ? " joined" : "");
      for (const BucketSnapshot& bucket : state->engine.Snapshot())
        text += "; " + bucket.name + " completed " + std::to_string(bucket.completed) +
                (bucket.pending ? " pending" : "") + (bucket.missed_rounds > 0 ? " missed" : "");
    }
    return text;
  }

  static std::string Describe(const BucketSet& set) {
    std::string text = set.all ? "everywhere" : "in";
    for (const std::string& name : set.names) text += " " + name;
    return text;
  }

  // What would have been an internal error of the attachment, or a breach of its contract by the engine; or "".
  std::string complaint() const {
    std::lock_guard<std::mutex> lock(complaint_mutex_);
    return complaint_;
  }

 private:
  struct Entry {
    const void* input = nullptr;
    void* output = nullptr;
    std::size_t bytes = 0;
    Memory* memory = nullptr;
    std::shared_ptr<SharedBucket> handle;  // null: zeros of a bucket that this rank does not know
    std::shared_ptr<Buffer> zeros;
  };
  static void* Input(const Entry& entry) { return View(*entry.memory, entry.input, entry.bytes); }
  // An entry that a device reduces while the cycles go on.
  struct OnDevice {
    Entry entry;
    std::vector<char> input;  // what was to be sent, when the reduction began
    std::vector<char> result;
    std::string error;
    int cycles;  // until it is called back
  };

  struct RankState final : Collectives {
    RankState(FakeHorovod& the_owner, Rank the_rank, int size, Engine::Thresholds thresholds)
        : owner(the_owner), rank(the_rank), engine(*this, the_rank, size, thresholds, arrivals) {
      if (the_owner.settings_.finalizer) finalizer = std::make_unique<FakeStream>(static_cast<std::uint64_t>(the_rank));
    }

    void Place(const std::shared_ptr<SharedBucket>& bucket, const std::string& name, const BucketConfig& config,
               const Bucket::Entry& entry) override {
      std::lock_guard<std::mutex> lock(queue_mutex);
      Entry made;
      if (entry.member) made = {entry.input, entry.output, config.bytes(), config.memory, bucket, nullptr};
      if (!table.emplace(name, made).second) throw std::logic_error("two entries for " + name);
    }
    bool Alive() const override { return alive; }

    FakeHorovod& owner;
    const Rank rank;
    std::mutex queue_mutex;  // guards the table
    std::map<std::string, Entry> table;
    std::atomic<bool> alive{true};
    std::atomic<bool> wants_join{false};
    std::atomic<bool> joined{false};
    std::atomic<bool> foreign{false};
    std::atomic<Time> foreign_since{kNever};

    // Background only, as all that follows, up to the engine.
    std::vector<OnDevice> on_device;

    // Of one cycle.
    bool wants_cycle = false;
    bool has_foreign = false;
    Report report;
    std::vector<Entry> entries;             // of the response that runs
    std::vector<std::vector<char>> inputs;  // what was to be sent, when the reduction began
    std::vector<std::vector<char>> results;

    const std::shared_ptr<PossibleArrivals> arrivals = std::make_shared<PossibleArrivals>();
    Engine engine;
    std::unique_ptr<FakeStream> finalizer;  // null: the background calls back
  };

  // Tensors that are reduced, or refused, together.
  struct Response {
    std::vector<Closing> closings;
    std::vector<std::int32_t> words;  // the closings, as they travel
    std::size_t first_round = 0;      // in history_
  };

  Time ForeignSince(const RankState& state) const { return state.foreign ? state.foreign_since.load() : kNever; }

  void Complain(const std::string& what) {
    std::lock_guard<std::mutex> lock(complaint_mutex_);
    if (complaint_.empty()) complaint_ = what;
    shutdown_ = true;
  }
  // As Session::Guard.
  template <class Hook>
  void Guard(const Hook& hook) {
    try {
      hook();
    } catch (const std::exception& error) {
      Complain(error.what());
    }
  }

  // --- A cycle, in its order

  void Pop(Rank rank) {
    RankState& state = *ranks_[Index(rank)];
    for (OnDevice& each : state.on_device) --each.cycles;
    Guard([&] { FinishOnDevice(state); });
    state.has_foreign = state.foreign;
    const bool joins = state.wants_join;
    if (joins) {
      state.joined = true;
      state.wants_join = false;
    }
    state.wants_cycle = joins || state.engine.WantsCycle(settings_.clock(rank), ForeignSince(state)) ||
                        (rank == 0 && coordinator_.NextDeadline() <= settings_.coordinator_clock());
  }

  // What all ranks know of each other after the bitwise and.
  void Agree() {
    ends_ = shutdown_;
    const bool barrier =
        std::all_of(ranks_.begin(), ranks_.end(), [](const auto& state) { return state->has_foreign; });
    if (barrier)
      for (auto& state : ranks_) state->foreign = false;
    negotiates_ =
        barrier || std::any_of(ranks_.begin(), ranks_.end(), [](const auto& state) { return state->wants_cycle; });
  }

  void MakeReport(Rank rank) {
    RankState& state = *ranks_[Index(rank)];
    const Report report = state.engine.BuildReport(settings_.clock(rank), ForeignSince(state), state.joined);
    state.report = FromBytes<Report>(BytesOf(report), "a report");
  }

  void Coordinate(Random& random, const std::function<void()>& between) {
    Guard([&] {
      const Time now = settings_.coordinator_clock();
      for (Rank rank = 1; rank < size(); ++rank) coordinator_.Observe(rank, ranks_[Index(rank)]->report, now);
      MakeReport(0);
      coordinator_.Observe(0, ranks_[0]->report, now);
      std::vector<bool> joined;
      for (const auto& state : ranks_) joined.push_back(state->joined);
      coordinator_.SetJoined(joined);
      std::vector<Closing> closings = coordinator_.Decide(now);
      grants_ = BytesOf(coordinator_.grants());
      between();
      ranks_[0]->engine.Begin(closings, joined[0]);
      ranks_[0]->engine.sharing().Hear(FromBytes<std::vector<Grants>>(grants_, "grants"));
      responses_.clear();
      std::size_t room = 0;
      for (Closing& closing : closings) {
        if (!closing.error.empty()) coordinator_.Forget(closing.bucket);
        if (room == 0 || !closing.error.empty() || !responses_.back().closings[0].error.empty()) {
          responses_.emplace_back();
          responses_.back().first_round = history_.size();
          room = settings_.fused != 0 ? settings_.fused : static_cast<std::size_t>(1 + Below(random, 3));
        }
        PastRound past;
        past.closing = closing;
        past.inputs.resize(ranks_.size());
        past.outputs.resize(ranks_.size());
        past.sent.resize(ranks_.size());
        past.results.resize(ranks_.size());
        history_.push_back(std::move(past));
        Append(closing, responses_.back().words);
        responses_.back().closings.push_back(std::move(closing));
        --room;
      }
      if (std::all_of(joined.begin(), joined.end(), [](bool each) { return each; }))
        for (auto& state : ranks_) {
          state->joined = false;
          state->engine.ReturnFromJoin();
        }
    });
  }

  void Receive(Rank rank) {
    RankState& state = *ranks_[Index(rank)];
    Guard([&] {
      std::vector<Closing> closings;
      for (const Response& response : responses_) {
        std::size_t at = 0;
        for (const Closing& closing : response.closings) {
          closings.push_back(DecodeClosing(response.words, at));
          closings.back().bucket = closing.bucket;
          closings.back().error = closing.error;
        }
      }
      if (rank != 0) state.engine.Begin(closings, state.joined);
      if (rank != 0) state.engine.sharing().Hear(FromBytes<std::vector<Grants>>(grants_, "grants"));
      if (state.joined) return;
      for (const Closing& closing : closings) FillMissing(state, closing.bucket);
    });
  }

  // What it does not know, or what has failed there, is sent as zeros.
  void FillMissing(RankState& state, const std::string& bucket) {
    {
      std::lock_guard<std::mutex> lock(state.queue_mutex);
      if (state.table.count(bucket) > 0) return;
    }
    Entry entry;
    for (const auto& other : ranks_)  // the response tells the size
      if (const auto config = other->engine.buckets().ConfigOf(bucket)) entry.bytes = config->bytes();
    entry.zeros = std::make_shared<Buffer>();
    entry.memory = &memory(state.rank);
    try {
      entry.zeros->Reserve(entry.bytes, *entry.memory);
      if (entry.bytes > 0) entry.zeros->Zero();
    } catch (const std::exception& error) {
      throw EngineError("rank " + std::to_string(state.rank) + " cannot take part with zeros in " + bucket + ": " +
                        error.what());
    }
    entry.input = entry.output = entry.zeros->data();
    std::lock_guard<std::mutex> lock(state.queue_mutex);
    state.table.emplace(bucket, entry);
  }

  void Gather(Rank rank, std::size_t i) {
    RankState& state = *ranks_[Index(rank)];
    const Response& response = responses_[i];
    state.entries.assign(response.closings.size(), {});
    state.inputs.assign(response.closings.size(), {});
    if (state.joined) return;
    for (std::size_t k = 0; k < response.closings.size(); ++k) {
      const Closing& closing = response.closings[k];
      {
        std::lock_guard<std::mutex> lock(state.queue_mutex);
        const auto entry = state.table.find(closing.bucket);
        if (entry == state.table.end()) {
          Complain("no entry for " + closing.bucket + " on rank " + std::to_string(rank));
          continue;
        }
        state.entries[k] = std::move(entry->second);
        state.table.erase(entry);
      }
      if (!closing.error.empty()) continue;
      const Entry& entry = state.entries[k];
      if (entry.input != nullptr) {
        const auto* bytes = static_cast<const char*>(Input(entry));
        state.inputs[k].assign(bytes, bytes + entry.bytes);
      }
      PastRound& past = history_[response.first_round + k];
      past.inputs[Index(rank)] = entry.input;
      past.outputs[Index(rank)] = entry.output;
      past.sent[Index(rank)] = state.inputs[k];
      const bool member = closing.Includes(rank);
      if (member != (entry.input != nullptr) && (member || entry.handle != nullptr))
        Complain("rank " + std::to_string(rank) + " takes part in another way than the closing of " + closing.bucket +
                 " says");
    }
  }

  // Every rank adds up what all of its group send, in the same order.
  void Reduce(Rank rank, std::size_t i) {
    RankState& state = *ranks_[Index(rank)];
    const Response& response = responses_[i];
    state.results.assign(response.closings.size(), {});
    for (std::size_t k = 0; k < response.closings.size(); ++k) {
      if (!response.closings[k].error.empty()) continue;
      std::vector<char>& result = state.results[k];
      for (const Rank member : response.closings[k].members(rank)) {
        const auto& other = ranks_[Index(member)];
        const Entry& entry = other->entries[k];
        if (entry.input == nullptr) continue;  // joined
        if (std::memcmp(Input(entry), other->inputs[k].data(), entry.bytes) != 0)
          Complain("rank " + std::to_string(other->rank) + " writes what is being sent");
        if (result.empty()) {
          result = other->inputs[k];
        } else {
          const DataType type = TypeOf(response.closings[k].bucket);
          Add(type, result.data(), Input(entry), result.size() / SizeOf(type));
        }
      }
      history_[response.first_round + k].results[Index(rank)] = result;
    }
  }

  DataType TypeOf(const std::string& bucket) const {
    for (const auto& state : ranks_)
      if (const auto config = state->engine.buckets().ConfigOf(bucket)) return config->type;
    return DataType::kFloat32;
  }

  void Callback(Rank rank, std::size_t i) {
    RankState& state = *ranks_[Index(rank)];
    Guard([&] {
      for (std::size_t k = 0; k < state.entries.size(); ++k) {
        const Closing& closing = responses_[i].closings[k];
        Entry& entry = state.entries[k];
        std::string error = closing.error;
        if (error.empty()) error = settings_.fault(closing, rank);
        const int cycles = closing.error.empty() ? settings_.device_cycles(rank) : 0;
        OnDevice each{std::exchange(entry, {}), std::move(state.inputs[k]), std::move(state.results[k]), error, cycles};
        if (state.finalizer != nullptr && closing.error.empty()) {
          state.finalizer->Queue([this, &state, each] { Guard([&] { Finish(state, each); }); });
        } else {
          state.on_device.push_back(std::move(each));
        }
      }
      FinishOnDevice(state);
    });
  }

  void FinishOnDevice(RankState& state) {
    std::vector<OnDevice> ended;
    std::vector<OnDevice> running;
    for (OnDevice& each : std::exchange(state.on_device, {}))
      (each.cycles <= 0 ? ended : running).push_back(std::move(each));
    state.on_device = std::move(running);
    for (const OnDevice& each : ended) Finish(state, each);
  }

  // Background, or the finalizer's thread.
  void Finish(RankState& state, const OnDevice& each) {
    const Entry& entry = each.entry;
    if (!each.input.empty() && std::memcmp(Input(entry), each.input.data(), each.input.size()) != 0)
      Complain("rank " + std::to_string(state.rank) + " writes what a device reduces");
    if (each.error.empty() && entry.output != nullptr && !each.result.empty())
      std::memcpy(View(*entry.memory, entry.output, entry.bytes), each.result.data(), entry.bytes);
    if (entry.handle != nullptr) state.engine.Finished(entry.handle, each.error);
    CountWakeUp();
  }

  // Calls back under the queue's lock, as Horovod does.
  void Finalize(Rank rank) {
    RankState& state = *ranks_[Index(rank)];
    state.alive = false;
    if (state.finalizer != nullptr) state.finalizer->WaitForAll();
    for (OnDevice& each : state.on_device) each.cycles = 0;
    FinishOnDevice(state);
    {
      std::lock_guard<std::mutex> lock(state.queue_mutex);
      for (const auto& [name, entry] : state.table) {
        if (entry.handle != nullptr) state.engine.Finished(entry.handle, "Horovod has been shut down");
        CountWakeUp();
      }
      state.table.clear();
    }
    state.engine.Close("Horovod has been shut down");  // as a session's watcher does
    CountWakeUp();
  }

  // --- One thread for each rank

  // All ranks come here; the last one calls `together` before any goes on.
  void Meet(const std::function<void()>& together = [] {}) {
    std::unique_lock<std::mutex> lock(meeting_mutex_);
    const int meeting = meetings_;
    if (++present_ == size()) {
      together();
      present_ = 0;
      ++meetings_;
      meeting_over_.notify_all();
    } else {
      meeting_over_.wait(lock, [&] { return meetings_ != meeting; });
    }
  }

  void Run(Rank rank) {
    Random random(static_cast<std::uint64_t>(rank));
    for (;;) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));  // Horovod's cycle time, but shorter
      Pop(rank);
      Meet([&] { Agree(); });
      if (ends_) return Finalize(rank);
      if (!negotiates_) {
        Meet();
        continue;
      }
      if (rank != 0) MakeReport(rank);
      Meet();
      if (rank == 0) Coordinate(random, [] {});
      Meet();
      Receive(rank);
      for (std::size_t i = 0; i < responses_.size(); ++i) {
        Gather(rank, i);
        Meet();
        Reduce(rank, i);
        Meet();
        Callback(rank, i);
      }
      Meet();
    }
  }

  const Settings settings_;
  std::vector<std::unique_ptr<RankState>> ranks_;
  Coordinator coordinator_;
  std::atomic<bool> shutdown_{false};
  std::atomic<std::size_t> wake_ups_{0};

  // Of a cycle: written by one thread while all others wait for it.
  bool ends_ = false;
  bool negotiates_ = false;
  std::vector<Response> responses_;
  std::string grants_;  // of this cycle, as they travel
  std::vector<PastRound> history_;

  mutable std::mutex complaint_mutex_;
  std::string complaint_;

  std::vector<std::thread> threads_;
  std::mutex meeting_mutex_;
  std::condition_variable meeting_over_;
  int present_ = 0;
  int meetings_ = 0;
};

}  // namespace horovod_partial::test
