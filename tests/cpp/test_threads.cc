// The engine with ranks as threads: invariants of the design by their names, under thousands of interleavings drawn
// from seeds, and with free threads. I3 and I4 are the coordinator's alone, and test_exhaustive.cc explores them.
//
// HOROVOD_PARTIAL_TEST_SEED=n runs the drawn interleavings with that seed only, HOROVOD_PARTIAL_TEST_COUNT=n that many
// of them for each invariant.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "engine/shared_bucket.h"
#include "harness/application.h"
#include "harness/fake_horovod.h"
#include "harness/fake_job.h"
#include "harness/threads.h"

namespace horovod_partial::test {
namespace {

using namespace std::chrono_literals;
using testing::AnyOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

// --- A job under a script

// What one seed draws.
struct Draw {
  int size = 3;
  std::vector<BucketConfig> configs;  // by bucket
  std::vector<int> steps;             // by rank
  int flushes = 0;                    // of every rank
  int barriers = 0;                   // of every rank: collectives that are not ours
  bool delivers = false;              // ranks deliver alone, now and then, and throw the results away
  int shutdown_after = -1;            // cycles
  bool device = false;                // of each rank: its reductions end cycles after they began, at its own time
  bool patient = false;               // for the hooks every wait has lasted long enough to count, not just every second
  bool trains = false;                // what a rank contributes is what it got last, and a step from there
};

Draw DrawJob(Random& random) {
  Draw draw;
  draw.size = 2 + Below(random, 3);
  const int buckets = 1 + Below(random, 3);
  for (int b = 0; b < buckets; ++b) {
    BucketConfig config = Config(1 + Below(random, draw.size));
    if (Below(random, 4) == 0) {
      config.spec.policy.rule = Policy::Rule::kInitiator;
      config.spec.policy.seed = random();
    }
    config.spec.policy.max_staleness = std::vector<Round>{0, 1, 2, 16}[static_cast<std::size_t>(Below(random, 4))];
    config.spec.policy.grace =
        std::vector<Time>{0ms, 3ms, Policy::kAutomaticGrace}[static_cast<std::size_t>(Below(random, 3))];
    config.spec.missed = Below(random, 2) == 0 ? Missed::kSum : Missed::kReplay;
    draw.configs.push_back(config);
  }
  for (Rank rank = 0; rank < draw.size; ++rank) draw.steps.push_back(1 + Below(random, 4));
  // Not both: a rank in a barrier and one in a flush wait for each other, as they would in two barriers.
  (Below(random, 2) == 0 ? draw.flushes : draw.barriers) = Below(random, 3);
  draw.patient = Below(random, 2) == 0;
  draw.device = Below(random, 2) == 0;
  return draw;
}

class Job : public FakeJob {
 public:
  Job(std::uint64_t seed, Draw draw) : draw_(std::move(draw)), script_(seed) {
    Start(MakeSettings(), draw_.configs,
          draw_.device ? std::make_shared<FakeDevices>(draw_.size, FakeDevices::Streams::kNone) : nullptr);
    for (auto& application : applications()) {
      const std::uint64_t own_seed = script_.random()();
      script_.Spawn([this, &application = *application, own_seed] { RunApplication(application, own_seed); });
    }
  }

  // Until every application has come to its end.
  void Run() {
    int idle_cycles = 0;
    std::size_t progress = 0;
    for (int cycle = 0; !script_.Done(); ++cycle) {
      if (cycle == draw_.shutdown_after) horovod().Shutdown();
      if (!horovod().Cycle(script_.random(), [this] { Interleave(); })) {
        // From here on it takes time: a flush looks now and then whether there still is a Horovod.
        std::this_thread::sleep_for(1ms);
        continue;
      }
      const std::size_t now = Rounds() + script_.ends();
      idle_cycles = now > progress ? 0 : idle_cycles + 1;
      progress = now;
      if (idle_cycles == kIdleCycles) {
        hang_ = "no progress for " + std::to_string(kIdleCycles) + " cycles: " + horovod().Describe();
        horovod().Shutdown();
      }
    }
  }

  // What it waited for, if it would never have ended by itself; or "".
  const std::string& hang() const { return hang_; }
  const Draw& draw() const { return draw_; }
  const std::vector<PastRound>& history() const { return horovod().history(); }

 private:
  // Far more than it takes until a hook finds a wait to be long, and an application has come to its next arrival.
  static constexpr int kIdleCycles = 500;

  FakeHorovod::Settings MakeSettings() {
    FakeHorovod::Settings settings;
    settings.size = draw_.size;
    settings.fused = 0;
    // For a hook either no wait has lasted long enough to count, or each has; and no arrival is old.
    settings.clock = [this](Rank) { return Now() + (draw_.patient || Below(script_.random(), 2) == 0 ? 1ms : -1h); };
    settings.coordinator_clock = [this] { return time_ += 1ms; };
    if (draw_.device) settings.device_cycles = [this](Rank) { return Below(script_.random(), 4); };
    return settings;
  }

  void Interleave() {
    if (std::exchange(wake_ups_, horovod().wake_ups()) != horovod().wake_ups()) script_.Settle();
    script_.Interleave();
  }

  void RunApplication(Application& application, std::uint64_t own_seed) {
    Random random(own_seed);
    try {
      Operation(application, random);
    } catch (const std::exception& error) {
      application.error = error.what();
    }
  }

  void Operation(Application& application, Random& random) {
    Engine& engine = EngineOf(application.rank());
    int flushes = draw_.flushes;
    int barriers = draw_.barriers;
    const int steps = draw_.steps[static_cast<std::size_t>(application.rank())];
    for (int step = 0; step < steps; ++step) {
      Step(application, random, step == 0 || Below(random, 2) == 0);
      const bool last = step == steps - 1;
      for (; flushes > 0 && (last || Below(random, 2) == 0); --flushes) {
        script_.Block([&] { WaitForFlush(engine); });
        application.Collect();
      }
      for (; barriers > 0 && (last || Below(random, 2) == 0); --barriers) Barrier(application.rank());
      if (draw_.delivers && Below(random, 3) == 0) script_.Block([&] { engine.Deliver(); });
    }
    script_.Block([&] { WaitForEnd(engine); });
    application.Collect();
  }

  void Barrier(Rank rank) {
    const auto wait = horovod().SubmitForeign(rank);
    while (horovod().IsForeignOutstanding(rank)) {
      if (!horovod().IsAlive(rank)) throw EngineError("shut down in a barrier");
      script_.Yield();
    }
  }

  // All buckets arrive before the first wait, or each is waited for before the next arrives. In the first step that
  // would be a deadlock in Horovod too, if the ranks' orders differ.
  void Step(Application& application, Random& random, bool together) {
    std::vector<int> order(draw_.configs.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (const int bucket : order) {
      script_.Yield();
      const bool in_place = Below(random, 2) == 0;
      const int polls = draw_.device ? Below(random, 5) : 0;
      if (draw_.trains) {
        application.ArriveWith(bucket, Train(application, bucket, random), in_place, polls);
      } else {
        application.Arrive(bucket, in_place, polls);
      }
      if (!together) AwaitResult(application, bucket);
    }
    if (!together) return;
    std::shuffle(order.begin(), order.end(), random);
    for (const int bucket : order) AwaitResult(application, bucket);
  }

  static Floats Train(Application& application, int bucket, Random& random) {
    const auto& got = application.At(bucket).got;
    Floats model = got.empty() ? Floats(kElements) : got.back().results.back();
    for (float& weight : model) weight += std::uniform_real_distribution<float>(-1, 1)(random);
    return model;
  }

  void AwaitResult(Application& application, int bucket) {
    script_.Yield();
    script_.Block([&] { application.Wait(bucket); });
  }

  const Draw draw_;
  Script script_;
  Time time_{0};
  std::size_t wake_ups_ = 0;
  std::string hang_;
};

// --- Invariants

Floats FloatsOf(const std::vector<char>& bytes) {
  Floats values(kElements);
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void ExpectNoErrors(const FakeJob& job) {
  for (const auto& application : job.applications())
    EXPECT_EQ(application->error, "") << "rank " << application->rank();
}

// In each bucket of gradients every rank has got all that all ranks have submitted.
void ExpectExactlyOnce(const FakeJob& job) {
  ExpectNoErrors(job);
  for (int bucket = 0; bucket < job.applications()[0]->buckets(); ++bucket) {
    if (!job.applications()[0]->HasGradients(bucket)) continue;
    Floats submitted(kElements);
    for (const auto& application : job.applications()) AddTo(submitted, application->At(bucket).submitted);
    for (const auto& application : job.applications())
      EXPECT_EQ(application->Total(bucket), submitted) << "bucket " << bucket << " on rank " << application->rank();
  }
}

std::uint64_t FromEnvironment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class InvariantsTest : public testing::Test {
 protected:
  // Runs a job for each seed, and checks it. `adapt` changes what was drawn.
  void ForEachSeed(
      const std::function<void(Job&)>& check, const std::function<void(Draw&, Random&)>& adapt = [](Draw&, Random&) {},
      std::uint64_t default_count = kSanitized ? 60 : 600) {
    const std::uint64_t only = FromEnvironment("HOROVOD_PARTIAL_TEST_SEED", 0);
    const std::uint64_t count = only != 0 ? 1 : FromEnvironment("HOROVOD_PARTIAL_TEST_COUNT", default_count);
    const std::uint64_t first = only != 0 ? only : 1;
    std::printf("seeds %llu to %llu\n", static_cast<unsigned long long>(first),
                static_cast<unsigned long long>(first + count - 1));
    for (std::uint64_t seed = first; seed < first + count && !HasFailure(); ++seed) {
      const std::string name = "seed " + std::to_string(seed) + "; HOROVOD_PARTIAL_TEST_SEED repeats it";
      SCOPED_TRACE(name);
      const Watchdog watchdog(name);
      Random random(seed);
      Draw draw = DrawJob(random);
      adapt(draw, random);
      Job job(seed, std::move(draw));
      job.Run();
      EXPECT_EQ(job.horovod().complaint(), "");
      EXPECT_EQ(job.hang(), "");
      if (!HasFailure()) check(job);
    }
  }

  // Every application has come to its end, by a shutdown or without one.
  static void ExpectEnds(Job& job) {
    for (const auto& application : job.applications())
      EXPECT_THAT(application->error, AnyOf("", HasSubstr("shut down"))) << "rank " << application->rank();
    if (job.draw().shutdown_after < 0) ExpectNoErrors(job);
  }

  static std::vector<const PastRound*> RoundsOf(const Job& job, int bucket) {
    std::vector<const PastRound*> rounds;
    for (const PastRound& past : job.history())
      if (past.closing.bucket == BucketName(bucket)) rounds.push_back(&past);
    return rounds;
  }
  // Of a round of all ranks together.
  static Floats ResultOf(const PastRound& past) { return FloatsOf(past.results[0]); }
};

TEST_F(InvariantsTest, InvariantI1ExactlyOnce) { ForEachSeed(ExpectExactlyOnce); }

// What each rank gets is, bit for bit, the results of the rounds since it last got one; each of them once.
TEST_F(InvariantsTest, InvariantI2OneResult) {
  ForEachSeed([](Job& job) {
    for (std::size_t b = 0; b < job.draw().configs.size(); ++b) {
      const std::vector<const PastRound*> rounds = RoundsOf(job, static_cast<int>(b));
      for (Rank rank = 0; rank < job.draw().size; ++rank) {
        if (job.draw().configs[b].spec.missed == Missed::kReplay) {
          std::vector<Floats> taken;
          for (const Application::Got& got : job.At(rank).At(static_cast<int>(b)).got)
            taken.insert(taken.end(), got.results.begin(), got.results.end());
          std::vector<Floats> expected;
          for (const PastRound* round : rounds)
            if (round->closing.gradients() > 0) expected.push_back(ResultOf(*round));
          ASSERT_LE(taken.size(), expected.size());
          expected.resize(taken.size());
          EXPECT_EQ(taken, expected) << "rank " << rank << " bucket " << b;
          continue;
        }
        std::size_t next = 0;
        for (const Application::Got& got : job.At(rank).At(static_cast<int>(b)).got) {
          SCOPED_TRACE("rank " + std::to_string(rank) + " bucket " + std::to_string(b) + " round " +
                       std::to_string(got.info.round));
          ASSERT_LT(got.info.round, static_cast<Round>(rounds.size()));
          ASSERT_LE(static_cast<Round>(next), got.info.round) << "a round's result is taken twice";
          std::vector<Floats> expected;
          for (; static_cast<Round>(next) <= got.info.round; ++next)
            if (rounds[next]->closing.gradients() > 0) expected.push_back(ResultOf(*rounds[next]));
          while (expected.size() > 1) {
            AddTo(expected[1], expected[0]);
            expected.erase(expected.begin());
          }
          if (expected.empty()) expected.emplace_back(kElements);
          EXPECT_EQ(got.results, expected);
        }
      }
    }
  });
}

// Of Full() there is nothing in the engine. What can be said here: a round in which everybody is on time is the
// transport's own. It reads and writes the application's memory, and nobody else touches a bit of it.
TEST_F(InvariantsTest, InvariantI5FullRoundsAreTheTransports) {
  const float patterns[] = {-0.0f, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(), 0.1f};
  FakeHorovod horovod({});
  Random random(1);
  for (int round = 0; round < 20; ++round) {
    std::vector<Floats> inputs(3, Floats(std::begin(patterns), std::end(patterns)));
    std::vector<Floats> outputs(3, Floats(kElements));
    std::vector<std::shared_ptr<SharedBucket>> handles;
    for (Rank rank = 0; rank < 3; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      handles.push_back(horovod.engine(rank).buckets().Declare("bucket", Config(3)));
      horovod.engine(rank).Arrive(handles.back(), {inputs[r].data(), outputs[r].data(), 1});
    }
    horovod.Cycle(random, [] {});
    ASSERT_EQ(horovod.history().size(), static_cast<std::size_t>(round + 1));
    const PastRound& past = horovod.history().back();
    for (std::size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(past.inputs[r], inputs[r].data());
      EXPECT_EQ(past.outputs[r], outputs[r].data());
      EXPECT_EQ(std::memcmp(inputs[r].data(), patterns, sizeof patterns), 0);
      EXPECT_EQ(std::memcmp(outputs[r].data(), past.results[r].data(), sizeof patterns), 0);
    }
  }
}

TEST_F(InvariantsTest, InvariantI6NoHang) {
  ForEachSeed(ExpectEnds, [](Draw& draw, Random& random) {
    draw.delivers = Below(random, 2) == 0;
    if (Below(random, 2) == 0) draw.shutdown_after = Below(random, 30);
  });
}

// The transport complains when an input changes while it is being read.
TEST_F(InvariantsTest, InvariantI7NoTornData) {
  std::size_t rounds = 0;
  ForEachSeed([&](Job& job) { rounds += job.history().size(); },
              [](Draw& draw, Random&) {
                for (auto& config : draw.configs)
                  config.spec.policy.quorum = 1;  // most arrivals come while a round is running
                for (int& steps : draw.steps) ++steps;
              });
  EXPECT_GT(rounds, 0u);
}

TEST_F(InvariantsTest, InvariantI8OnTimeMeansNoCopy) {
  ForEachSeed([](Job& job) {
    for (const PastRound& past : job.history()) {
      const int bucket = past.closing.bucket.back() - '0';
      for (Rank rank = 0; rank < job.draw().size; ++rank) {
        const auto r = static_cast<std::size_t>(rank);
        const Closing::Contribution& contribution = past.closing.contributions[r];
        if (!contribution.fresh || contribution.gradients != 1) continue;
        const Application::Tensors& tensors = job.At(rank).At(bucket);
        EXPECT_EQ(past.inputs[r], tensors.input.data());
        EXPECT_THAT(past.outputs[r], AnyOf(tensors.input.data(), tensors.output.data()));
      }
    }
    for (Rank rank = 0; rank < job.draw().size; ++rank) {
      for (int bucket = 0; bucket < job.At(rank).buckets(); ++bucket) {
        const SharedBucket& handle = *job.At(rank).At(bucket).handle;
        const bool was_late = handle.statistics.late[static_cast<std::size_t>(rank)] > 0;
        EXPECT_EQ(handle.core.held_bytes() > 0, was_late) << "rank " << rank << " bucket " << bucket;
      }
    }
  });
}

// --- Models

Schedule DrawSchedule(Random& random, int size) {
  Schedule schedule;
  schedule.kind = Below(random, 2) == 0 ? Schedule::Kind::kButterfly : Schedule::Kind::kTable;
  schedule.group_size = 1 + Below(random, size);
  if (schedule.kind != Schedule::Kind::kTable) return schedule;
  for (int partitions = 1 + Below(random, 3); partitions > 0; --partitions) {
    std::map<int, int> numbers;
    Partition partition;
    for (Rank rank = 0; rank < size; ++rank)
      partition.push_back(numbers.emplace(Below(random, size), static_cast<int>(numbers.size())).first->second);
    schedule.table.push_back(partition);
  }
  return schedule;
}

// Like the drawn one, with models that are kept and groups that follow a schedule.
BucketConfig DrawScheduled(const BucketConfig& drawn, Random& random, int size) {
  BucketConfig config = ModelConfig(DrawSchedule(random, size), Below(random, 4));
  config.spec.policy.rule = drawn.spec.policy.rule;
  config.spec.policy.seed = drawn.spec.policy.seed;
  config.spec.policy.quorum = Below(random, 3) == 0 ? drawn.spec.policy.quorum : 1;
  config.spec.policy.max_staleness = drawn.spec.policy.max_staleness;
  config.spec.policy.grace = drawn.spec.policy.grace;
  if (Below(random, 4) == 0) config.spec.divisor = Divisor::kNone;
  return config;
}

BucketConfig DrawReady(Random& random, int size, bool weighted) {
  return ReadyConfig(1 + Below(random, size), 1 + Below(random, 2 * size),
                     weighted ? Weights::kStaleness : Weights::kUniform);
}

// Groups are more than one with 4 ranks and more.
void DrawMoreRanks(Draw& draw, Random& random) {
  draw.size += Below(random, 3);
  while (static_cast<int>(draw.steps.size()) < draw.size) draw.steps.push_back(1 + Below(random, 4));
}

// Scheduled models, models of ready ranks, and now and then gradients beside them.
void DrawModels(Draw& draw, Random& random) {
  DrawMoreRanks(draw, random);
  for (BucketConfig& config : draw.configs) {
    const int kind = Below(random, 7);
    if (kind > 3) {
      config = DrawScheduled(config, random, draw.size);
    } else if (kind > 0) {
      config = DrawReady(random, draw.size, kind == 1);
    }
  }
  for (int& steps : draw.steps) steps *= 1 + Below(random, 3);
}

// What has happened to one bucket of models, by what went over the wire and what the applications have got.
class ModelsOfBucket {
 public:
  ModelsOfBucket(const FakeJob& job, int bucket)
      : applications_(job.applications()), bucket_(bucket), config_(applications_[0]->At(bucket).handle->config) {
    for (const PastRound& past : job.horovod().history()) {
      // A flush has nothing to deliver: it is no round.
      const bool is_round = past.closing.groups.empty() || !GroupsOf(past.closing.groups).empty();
      if (past.closing.bucket == BucketName(bucket) && is_round) rounds_.push_back(&past);
    }
  }

  void Check() const {
    for (std::size_t r = 0; r < rounds_.size(); ++r) {
      const Closing& closing = rounds_[r]->closing;
      SCOPED_TRACE(Describe(closing));
      EXPECT_EQ(closing.round, static_cast<Round>(r));
      EXPECT_EQ(closing.reason == Closing::Reason::kFirst, r == 0);
      EXPECT_TRUE(r > 0 || closing.groups.empty());
      if (IsReady()) {
        CheckReadyRound(*rounds_[r]);
      } else {
        CheckScheduledRound(*rounds_[r]);
      }
    }
    for (const auto& application : applications_) {
      SCOPED_TRACE("rank " + std::to_string(application->rank()));
      if (IsReady()) {
        CheckEveryModelIsReducedOnce(application->rank());
      } else {
        CheckKeptModels(application->rank());
      }
      CheckResults(application->rank());
    }
  }

  // Averages change no mean: what all ranks end with adds up to all steps that any has taken.
  void CheckMean() const {
    for (std::size_t i = 0; i < kElements; ++i) {
      double models = 0;
      double steps = 0;
      for (const auto& application : applications_) {
        const auto& tensors = TensorsOf(application->rank());
        models += tensors.got.back().results.back()[i];
        for (std::size_t step = 0; step < tensors.contributions.size(); ++step)
          steps += tensors.contributions[step][i] - (step == 0 ? 0.0 : tensors.got[step - 1].results.back()[i]);
      }
      EXPECT_NEAR(models, steps, 1e-6 * static_cast<double>(rounds_.size() * applications_.size())) << "element " << i;
    }
  }

 private:
  using Reason = Closing::Reason;

  int size() const { return static_cast<int>(applications_.size()); }
  bool IsReady() const { return config_.spec.policy.rule == Policy::Rule::kReady; }
  bool Divides() const { return config_.spec.divisor == Divisor::kContributors; }
  const Application::Tensors& TensorsOf(Rank rank) const { return applications_[Index(rank)]->At(bucket_); }
  static std::string Describe(const Closing& closing) {
    return "round " + std::to_string(closing.round) + " of " + closing.bucket + ", closed by " +
           NameOf(closing.reason) + " in groups " + testing::PrintToString(closing.groups);
  }
  static void ExpectNear(const Floats& values, const std::vector<double>& expected) {
    for (std::size_t i = 0; i < kElements; ++i)
      EXPECT_NEAR(values[i], expected[i], 1e-6 * std::max(1.0, std::abs(expected[i]))) << "element " << i;
  }

  void CheckScheduledRound(const PastRound& past) const {
    const Closing& closing = past.closing;
    const Policy& policy = config_.spec.policy;
    if (closing.round == 0) {
      const Round cycle = CycleOf(policy.schedule, size());
      ASSERT_EQ(closing.upcoming.size(), static_cast<std::size_t>(cycle));
      for (Round round = 1; round <= cycle; ++round)
        EXPECT_EQ(closing.upcoming[static_cast<std::size_t>(round - 1)], GroupsOf(policy.schedule, round, size()));
    } else if (IsFullRound(policy, closing.round)) {
      EXPECT_THAT(closing.groups, IsEmpty());
      EXPECT_THAT(closing.reason, AnyOf(Reason::kEverybody, Reason::kLiveness));
    } else {
      EXPECT_EQ(closing.groups, GroupsOf(policy.schedule, closing.round, size()));
    }
  }

  void CheckReadyRound(const PastRound& past) const {
    const Closing& closing = past.closing;
    for (Rank rank = 0; rank < size(); ++rank) {
      EXPECT_EQ(closing.contributions[Index(rank)].fresh, closing.Includes(rank)) << "rank " << rank;
      EXPECT_EQ(past.inputs[Index(rank)] != nullptr, closing.Includes(rank)) << "rank " << rank;
    }
    if (closing.round == 0) return;
    for (const Members& group : GroupsOf(closing.groups)) {
      if (closing.reason == Reason::kLiveness) {
        EXPECT_LE(static_cast<int>(group.size()), config_.spec.policy.group_size);
      } else {
        EXPECT_EQ(closing.reason, Reason::kQuorum);
        EXPECT_EQ(static_cast<int>(group.size()), config_.spec.policy.group_size);
      }
    }
  }

  // Of ready ranks: each model is in one group, in the order of the steps, sent from where it lies, and nothing is
  // kept.
  void CheckEveryModelIsReducedOnce(Rank rank) const {
    const Application::Tensors& tensors = TensorsOf(rank);
    std::size_t step = 0;
    int iteration = 0;
    for (const PastRound* past : rounds_) {
      if (!past->closing.Includes(rank)) continue;
      SCOPED_TRACE(Describe(past->closing));
      ASSERT_LT(step, tensors.contributions.size());
      const double weight = WeightOf(past->closing, rank, iteration);
      std::vector<double> model;
      for (const float value : tensors.contributions[step]) model.push_back(weight * value);
      ExpectNear(FloatsOf(past->sent[Index(rank)]), model);
      ++step;
    }
    EXPECT_EQ(step, tensors.contributions.size()) << "a model is lost";
    EXPECT_EQ(tensors.handle->core.held_bytes(), 0u);
  }

  // Of a rank that has got the model of `iteration` with its last round; moves that on.
  double WeightOf(const Closing& closing, Rank rank, int& iteration) const {
    if (config_.spec.weights == Weights::kUniform) return 1;
    std::vector<int> work;
    std::size_t mine = 0;
    for (const Rank member : closing.members(rank)) {
      if (member == rank) mine = work.size();
      work.push_back(closing.contributions[Index(member)].work);
    }
    EXPECT_EQ(work[mine], iteration + 1);
    iteration = *std::max_element(work.begin(), work.end());
    return StalenessWeights(work, config_.spec.weight_parameter)[mine];
  }

  // Each round has the newest model that the rank had announced, again and again until there is a newer one; as it was,
  // not torn; and not for more rounds than the staleness allows.
  void CheckKeptModels(Rank rank) const {
    const Application::Tensors& tensors = TensorsOf(rank);
    std::ptrdiff_t last_step = -1;
    Round last_new = -1;
    for (const PastRound* past : rounds_) {
      SCOPED_TRACE(Describe(past->closing));
      const Closing::Contribution& contribution = past->closing.contributions[Index(rank)];
      const Floats sent = FloatsOf(past->sent[Index(rank)]);
      if (contribution.gradients == 0) {
        EXPECT_FALSE(contribution.fresh);
        EXPECT_THAT(sent, Each(0));
        continue;
      }
      EXPECT_EQ(contribution.gradients, 1);
      const auto found = std::find(tensors.contributions.begin(), tensors.contributions.end(), sent);
      ASSERT_NE(found, tensors.contributions.end()) << "a model is sent that there never was";
      const std::ptrdiff_t step = found - tensors.contributions.begin();
      if (contribution.stale) {
        EXPECT_FALSE(contribution.fresh);
        EXPECT_EQ(step, last_step);
        EXPECT_LE(past->closing.round - last_new, config_.spec.policy.max_staleness);
      } else {
        EXPECT_GT(step, last_step);
        last_new = past->closing.round;
      }
      last_step = step;
    }
  }

  // What each rank has got of each of its steps.
  void CheckResults(Rank rank) const {
    const Application::Tensors& tensors = TensorsOf(rank);
    ASSERT_EQ(tensors.got.size(), tensors.contributions.size());
    Round last = -1;
    for (std::size_t step = 0; step < tensors.got.size(); ++step) {
      const Application::Got& got = tensors.got[step];
      const RoundInfo& info = got.info;
      SCOPED_TRACE("step " + std::to_string(step) + " got round " + std::to_string(info.round));
      ASSERT_GT(info.round, last) << "a round's result is taken twice";
      const Round before = last;
      ASSERT_LT(info.round, static_cast<Round>(rounds_.size()));
      last = info.round;
      const Closing& closing = rounds_[static_cast<std::size_t>(info.round)]->closing;
      const Members contributors = ContributorsOf(info.round, rank);
      EXPECT_EQ(info.members, contributors);
      EXPECT_EQ(info.gradients, static_cast<int>(contributors.size()));
      EXPECT_EQ(info.late, !closing.contributions[Index(rank)].fresh);
      ASSERT_EQ(got.results.size(), 1u) << "models are not replayed";
      std::vector<double> expected(kElements);
      if (IsReady()) {
        EXPECT_FALSE(info.late);
        expected = MeanOfModels(closing, contributors);
      } else {
        // A round in which nobody of the group had anything has no result: then it is an earlier one that was missed
        // too.
        Round from = info.round;
        while (from > before && ContributorsOf(from, rank).empty()) --from;
        EXPECT_EQ(info.empty, from == before);
        expected =
            SumOfKeptModels(from == before ? -1 : from, rank, info.late ? &tensors.contributions[step] : nullptr);
      }
      ExpectNear(got.results[0], expected);
      for (const Rank member : info.late ? Members() : contributors) {
        const Application::Got* other = OnTime(member, info.round);
        EXPECT_TRUE(other == nullptr || got.results == other->results) << "not the same bits as on rank " << member;
      }
    }
  }

  Members ContributorsOf(Round round, Rank rank) const {
    const Closing& closing = rounds_[static_cast<std::size_t>(round)]->closing;
    Members contributors;
    for (const Rank member : closing.members(rank))
      if (closing.contributions[Index(member)].gradients > 0) contributors.push_back(member);
    return contributors;
  }

  // In a round of a rank, or in none; with the rank's new model, if it was late.
  std::vector<double> SumOfKeptModels(Round round, Rank rank, const Floats* late) const {
    std::vector<double> sum(kElements);
    int models = 0;
    const auto add = [&](const Floats& model) {
      for (std::size_t i = 0; i < kElements; ++i) sum[i] += model[i];
      ++models;
    };
    if (round >= 0)
      for (const Rank member : ContributorsOf(round, rank))
        add(FloatsOf(rounds_[static_cast<std::size_t>(round)]->sent[Index(member)]));
    if (!Divides()) return sum;
    if (late != nullptr) add(*late);
    for (double& value : sum) value /= models;
    return sum;
  }

  // Of ready ranks, from what their applications had, not from what was sent.
  std::vector<double> MeanOfModels(const Closing& closing, const Members& members) const {
    std::vector<int> work;
    for (const Rank member : members) work.push_back(closing.contributions[Index(member)].work);
    const std::vector<double> weights =
        config_.spec.weights == Weights::kUniform
            ? std::vector<double>(members.size(), 1.0 / static_cast<double>(members.size()))
            : StalenessWeights(work, config_.spec.weight_parameter);
    std::vector<double> mean(kElements);
    for (std::size_t m = 0; m < members.size(); ++m) {
      std::size_t step = 0;
      for (Round round = 0; round < closing.round; ++round)
        if (rounds_[static_cast<std::size_t>(round)]->closing.Includes(members[m])) ++step;
      const Floats& model = TensorsOf(members[m]).contributions[step];
      for (std::size_t i = 0; i < kElements; ++i) mean[i] += weights[m] * model[i];
    }
    return mean;
  }

  const Application::Got* OnTime(Rank rank, Round round) const {
    for (const Application::Got& got : TensorsOf(rank).got)
      if (got.info.round == round && !got.info.late) return &got;
    return nullptr;
  }

  const std::vector<std::unique_ptr<Application>>& applications_;  // by rank
  const int bucket_;
  const BucketConfig config_;
  std::vector<const PastRound*> rounds_;
};

// And whether averages have changed the mean of all models, if that can be said.
void CheckModels(const FakeJob& job, bool mean = false) {
  ExpectNoErrors(job);
  for (int bucket = 0; bucket < job.applications()[0]->buckets(); ++bucket) {
    if (job.applications()[0]->HasGradients(bucket)) continue;
    const ModelsOfBucket models(job, bucket);
    models.Check();
    if (mean) models.CheckMean();
  }
}

using ModelsTest = InvariantsTest;

TEST_F(ModelsTest, AreReducedInTheirGroups) {
  ForEachSeed([](Job& job) { CheckModels(job); }, DrawModels);
}

TEST_F(ModelsTest, OfReadyRanksKeepTheirMean) {
  ForEachSeed([](Job& job) { CheckModels(job, true); },
              [](Draw& draw, Random& random) {
                draw.trains = true;
                DrawMoreRanks(draw, random);
                for (BucketConfig& config : draw.configs) config = DrawReady(random, draw.size, false);
                for (int& steps : draw.steps) steps *= 3;
              });
}

// Gradients beside models lose nothing.
TEST_F(ModelsTest, LeaveGradientsAlone) {
  ForEachSeed(ExpectExactlyOnce, [](Draw& draw, Random& random) {
    const BucketConfig gradients = draw.configs[0];
    DrawModels(draw, random);
    draw.configs[0] = gradients;
  });
}

// A rank that waits by notice has no entry that a shutdown would call back.
TEST_F(ModelsTest, HangNeither) {
  ForEachSeed(
      ExpectEnds,
      [](Draw& draw, Random& random) {
        DrawModels(draw, random);
        draw.shutdown_after = Below(random, 30);
      },
      kSanitized ? 20 : 60);
}

// --- Free threads

enum class On : std::uint8_t { kHost, kDevices };

constexpr int kFreeSteps = kSanitized ? 40 : 60;  // more, and the sums would exceed the integers that a float holds

// One background thread for each rank, and for each of its buckets a thread of its application. Nothing is scripted
// here: the sanitizers watch, and the results must be right in any case. On devices operations end at any time, and
// other threads than the background's call back.
class FreeThreadsTest : public testing::TestWithParam<On> {
 protected:
  void Run(FakeJob& job, int size, const std::vector<BucketConfig>& configs, int shutdown_at_step = -1) {
    FakeHorovod::Settings settings;
    settings.size = size;
    settings.thresholds = {1ms, 2ms};
    settings.fused = 0;
    std::shared_ptr<FakeDevices> devices;
    if (GetParam() == On::kHost) {
      settings.device_cycles = [](Rank rank) { return rank % 3; };
    } else {
      settings.finalizer = true;
      devices = std::make_shared<FakeDevices>(size, FakeDevices::Streams::kOwn);
    }
    job.Start(std::move(settings), configs, std::move(devices));
    job.horovod().Start();
    std::vector<std::thread> ranks;
    for (const auto& application : job.applications())
      ranks.emplace_back([&, &own = *application] { RunApplication(job, own, shutdown_at_step); });
    for (auto& rank : ranks) rank.join();
    job.horovod().Stop();
    EXPECT_EQ(job.horovod().complaint(), "");
    EXPECT_TRUE(failures_ == 0 || shutdown_at_step >= 0);
  }

 private:
  void RunApplication(FakeJob& job, Application& application, int shutdown_at_step) {
    std::vector<std::thread> threads;
    for (int bucket = 0; bucket < application.buckets(); ++bucket)
      threads.emplace_back([&, bucket] { CountFailure([&] { Train(job, application, bucket, shutdown_at_step); }); });
    for (auto& thread : threads) thread.join();
    CountFailure([&] {
      WaitForEnd(job.EngineOf(application.rank()));
      application.Collect();
    });
  }
  static void Train(FakeJob& job, Application& application, int bucket, int shutdown_at_step) {
    Random random(static_cast<std::uint64_t>(application.rank() * 100 + bucket));
    const bool alone = !application.HasGradients(bucket) && application.rank() % 2 == 1;  // when the others have ended
    const int steps = alone ? 2 * kFreeSteps : kFreeSteps;
    for (int step = 0; step < steps; ++step) {
      if (Below(random, 4) == 0) std::this_thread::sleep_for(std::chrono::microseconds(Below(random, 500)));
      if (step == shutdown_at_step && application.rank() == 0) job.horovod().Shutdown();
      application.Arrive(bucket, Below(random, 2) == 0, Below(random, 3));
      application.Wait(bucket);
    }
  }
  void CountFailure(const std::function<void()>& body) {
    try {
      body();
    } catch (const EngineError&) {
      ++failures_;
    }
  }

  const Watchdog watchdog_{"free threads"};
  std::atomic<int> failures_{0};
};

INSTANTIATE_TEST_SUITE_P(All, FreeThreadsTest, testing::Values(On::kHost, On::kDevices),
                         [](const auto& instance) { return instance.param == On::kHost ? "Host" : "Devices"; });

TEST_P(FreeThreadsTest, DeliverEverythingOnce) {
  FakeJob job;
  Run(job, 4, {Config(1), Config(2), Config(3)});
  ExpectExactlyOnce(job);
}

TEST_P(FreeThreadsTest, DeliverEverythingOnceWithReplay) {
  FakeJob job;
  Run(job, 2, {Config(1, Missed::kReplay), Config(2, Missed::kReplay)});
  ExpectExactlyOnce(job);
}

TEST_P(FreeThreadsTest, AverageKeptModelsInTheirGroups) {
  Random random(1);
  std::vector<BucketConfig> configs;
  for (const Round period : {0, 4, 0}) configs.push_back(ModelConfig(DrawSchedule(random, 4), period));
  configs[2].spec.policy.max_staleness = 1;
  FakeJob job;
  Run(job, 4, configs);
  CheckModels(job);
}

TEST_P(FreeThreadsTest, AverageModelsOfReadyRanks) {
  FakeJob job;
  Run(job, 5, {ReadyConfig(2), ReadyConfig(3, 2), ReadyConfig(2, 4, Weights::kStaleness)});
  CheckModels(job);
}

TEST_P(FreeThreadsTest, EndWhenHorovodDoes) {
  for (const int step : {0, 1, 7, 20}) {
    FakeJob job;
    Run(job, 3, {Config(1), Config(2)}, step);
  }
}

}  // namespace
}  // namespace horovod_partial::test
