// Buckets on a make-believe device: what it refuses and loses, one thing at a time. That rounds are right there is
// tested by test_threads and test_engine, whose jobs lie on such devices too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "harness/application.h"
#include "harness/fake_device.h"
#include "harness/fake_horovod.h"
#include "harness/fake_job.h"
#include "harness/threads.h"

namespace horovod_partial::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

// --- The device itself

class FakeDeviceTest : public testing::Test {
 protected:
  FakeDevices devices_{1, FakeDevices::Streams::kOwn};
  FakeDevice& device_ = devices_[0];
};

using FakeDeviceDeathTest = FakeDeviceTest;

TEST_F(FakeDeviceDeathTest, TheHostCannotTouchItsMemory) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  Buffer buffer;
  buffer.Reserve(sizeof(float), device_);
  EXPECT_DEATH(*static_cast<volatile float*>(buffer.data()) = 1, "");
}

TEST_F(FakeDeviceTest, OperationsTouchOnlyWhatIsAllocated) {
  Buffer buffer;
  buffer.Reserve(2 * sizeof(float), device_);
  buffer.Zero();
  const auto refuses = ThrowsMessage<std::logic_error>(HasSubstr("not allocated"));
  EXPECT_THAT([&] { device_.Scale(DataType::kFloat32, buffer.data(), 3, 1.0); }, refuses);
  float host = 0;
  EXPECT_THAT([&] { device_.Copy(buffer.data(), &host, sizeof host); }, refuses);
}

TEST_F(FakeDeviceTest, WhatWasNotWrittenIsNoNumber) {
  Buffer buffer;
  buffer.Reserve(sizeof(float), device_);
  EXPECT_TRUE(std::isnan(*static_cast<float*>(device_.Page(buffer.data(), sizeof(float)))));
}

// --- Memory, whichever it is

class MemoryTest : public testing::TestWithParam<bool> {
 protected:
  Memory& memory() { return GetParam() ? static_cast<Memory&>(devices_[0]) : Memory::Host(); }

  FakeDevices devices_{1, FakeDevices::Streams::kOwn};
};

INSTANTIATE_TEST_SUITE_P(All, MemoryTest, testing::Bool(),
                         [](const auto& instance) { return instance.param ? "Device" : "Host"; });

TEST_P(MemoryTest, AddsWhatIsFiniteAndElseLeavesTheTarget) {
  Tensor target(memory());
  Tensor source(memory());
  const auto add = [&](const Floats& values, bool first) {
    source.Set(values);
    return memory().AddIfFinite(DataType::kFloat32, target.data(), source.data(), kElements, first);
  };
  target.Set(Floats(kElements, std::nanf("")));
  EXPECT_TRUE(add(Floats(kElements, 2), true)) << "a copy takes nothing of what was there";
  EXPECT_EQ(target.values(), Floats(kElements, 2));
  EXPECT_TRUE(add(Floats(kElements, 3), false));
  EXPECT_EQ(target.values(), Floats(kElements, 5));
  for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (const bool first : {true, false}) {
      Floats values(kElements, 1);
      values.back() = bad;
      EXPECT_FALSE(add(values, first));
      EXPECT_EQ(target.values(), Floats(kElements, 5));
    }
  }
}

// --- What fails

BucketConfig DroppingConfig() {
  BucketConfig config = Config(1);
  config.spec.drop_nonfinite = true;
  return config;
}

BucketConfig AverageConfig(Missed missed) {
  BucketConfig config = Config(1, missed);
  config.spec.divisor = Divisor::kContributors;
  return config;
}

BucketConfig KeptConfig() {
  Schedule schedule;
  schedule.group_size = 2;
  return ModelConfig(schedule);
}

struct Kind {
  std::string name;
  BucketConfig config;
  bool partial = true;  // a round may be of one rank

  friend void PrintTo(const Kind& kind, std::ostream* stream) { *stream << kind.name; }
};

// Two ranks, each with a device and one bucket.
class Pair : public FakeJob {
 public:
  explicit Pair(const Kind& kind,
                std::shared_ptr<FakeDevices> devices = std::make_shared<FakeDevices>(2, FakeDevices::Streams::kNone))
      : kind_(kind), devices_(std::move(devices)) {
    FakeHorovod::Settings settings;
    settings.size = 2;
    settings.clock = [](Rank) { return Now() + 1h; };  // whoever waits has waited for long
    settings.device_cycles = [this](Rank) { return device_cycles_; };
    Start(std::move(settings), {kind_.config}, devices_);
  }
  ~Pair() { Shutdown(); }

  FakeDevice& device(Rank rank) { return (*devices_)[rank]; }
  // Reductions end so many cycles after they began.
  void RunOnDevices(int cycles) { device_cycles_ = cycles; }
  // What a rank does alone.
  void Step(Rank rank) {
    At(rank).Arrive(0);
    Wait(rank);
  }
  // Rank 1 comes after rounds, and while others run, then has missed two, and comes twice before it takes a result; all
  // is delivered and taken. Now and then its device makes the contribution only when it has been asked some times.
  void Train() {
    for (const int cycles : {0, 0, 2, 2}) {
      RunOnDevices(cycles);
      At(0).Arrive(0);
      Cycle();
      At(1).Arrive(0, true, cycles + 1);
      for (const Rank rank : {0, 1}) Wait(rank);
    }
    if (kind_.partial) {
      for (int round = 0; round < 2; ++round) Step(0);
      ArriveTwice();
      Step(0);
    }
    OnAllRanks([this](Rank rank) {
      WaitForEnd(EngineOf(rank));
      At(rank).Collect();
    });
  }

 private:
  void ArriveTwice() {
    Application& rank = At(1);
    for (int arrival = 0; arrival < 2; ++arrival) {
      rank.Arrive(0);
      while (horovod().IsAlive(1) && !rank.IsDone(0)) Cycle();
      EngineOf(1).Wait(*rank.At(0).handle, *rank.At(0).operation);
      Cycle();
    }
  }

  const Kind kind_;
  const std::shared_ptr<FakeDevices> devices_;
  int device_cycles_ = 0;
};

// The device of rank 1 fails at any moment. Then the rank says so, or Horovod's loop, which then ends; nobody hangs,
// and nothing stays allocated.
class FailingDeviceTest : public testing::TestWithParam<Kind> {
 protected:
  static constexpr const char* kNoMemory = "bad_alloc";

  void Sweep(const std::function<void(FakeDevice&, int)>& let, const std::string& cause) {
    const Watchdog watchdog(testing::UnitTest::GetInstance()->current_test_info()->name());
    int failures = 0;
    for (; failures < kMost; ++failures) {
      SCOPED_TRACE("so many succeed: " + std::to_string(failures));
      const std::string failure = Run([&](FakeDevice& device) { let(device, failures); });
      if (failure.empty()) break;
      ASSERT_THAT(failure, AllOf(HasSubstr("rank 1"), HasSubstr(BucketName(0)), HasSubstr(cause)));
    }
    EXPECT_EQ(failures > 0, GetParam().partial || cause != kNoMemory) << "who is never late needs no memory";
    EXPECT_LT(failures, kMost);
  }

 private:
  static constexpr int kMost = 200;

  static std::string Run(const std::function<void(FakeDevice&)>& let) {
    Pair pair(GetParam());
    pair.RunRoundZero();
    let(pair.device(1));
    std::string failure;
    try {
      pair.Train();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    // The application hears only of the shutdown; the rest is in the log, and goes to the other ranks.
    const std::string complaint = pair.horovod().complaint();
    return complaint.empty() ? failure : complaint;
  }
};

INSTANTIATE_TEST_SUITE_P(All, FailingDeviceTest,
                         testing::Values(Kind{"Sum", Config(1)}, Kind{"Average", AverageConfig(Missed::kSum)},
                                         Kind{"Latest", AverageConfig(Missed::kLatest)},
                                         Kind{"Replay", AverageConfig(Missed::kReplay)},
                                         Kind{"Dropping", DroppingConfig()}, Kind{"Kept", KeptConfig()},
                                         Kind{"Weighted", ReadyConfig(2, 8, Weights::kStaleness), false}),
                         [](const auto& instance) { return instance.param.name; });

TEST_P(FailingDeviceTest, WithoutMemory) {
  Sweep([](FakeDevice& device, int succeed) { device.Allow(succeed); }, kNoMemory);
}

TEST_P(FailingDeviceTest, InAnOperation) {
  Sweep([](FakeDevice& device, int succeed) { device.Operate(succeed); }, "the device has failed");
}

// --- Jobs

// A round still runs on the devices, another has been missed and something is pending, when Horovod is initialised
// anew.
TEST(DevicesTest, ARestartFreesWhatTheGenerationBeforeHad) {
  const Watchdog watchdog("a restart");
  const auto devices = std::make_shared<FakeDevices>(2, FakeDevices::Streams::kNone);
  for (int generation = 0; generation < 2; ++generation) {
    Pair pair({"Sum", Config(1)}, devices);
    pair.RunOnDevices(generation == 0 ? 2 : 0);
    pair.RunRoundZero();
    for (int round = 0; round < 2; ++round) pair.Step(0);
    pair.Step(1);
    EXPECT_EQ(pair.At(1).At(0).got.back().info.staleness, 2);
    pair.At(0).Arrive(0);
    pair.Cycle();
    EXPECT_EQ(pair.At(0).IsDone(0), generation > 0);
    pair.Shutdown();
    EXPECT_EQ(pair.horovod().complaint(), "");
  }
}

// Its number too: what another member of a family has of that round is gone.
TEST(DevicesTest, ARankThatJoinsWhileARoundRunsTakesNothingOfIt) {
  const Watchdog watchdog("a join");
  Pair pair({"Replay", Config(1, Missed::kReplay)});
  pair.RunRoundZero();
  pair.RunOnDevices(3);
  pair.At(0).Arrive(0);
  pair.Cycle();
  EXPECT_FALSE(pair.At(0).IsDone(0));
  pair.horovod().Join(1);
  pair.Wait(0);
  EXPECT_FALSE(pair.EngineOf(1).families().HasRound({BucketName(0)}));
  pair.horovod().Join(0);
  while (pair.horovod().IsJoining(0)) pair.Cycle();
  pair.RunRoundZero();
  EXPECT_EQ(pair.At(1).At(0).got.back().results, pair.At(0).At(0).got.back().results);
  EXPECT_EQ(pair.horovod().complaint(), "");
}

TEST(DevicesTest, AJobOnHostsAndDevicesIsRefusedByName) {
  const Watchdog watchdog("a mixed job");
  FakeDevices devices(1, FakeDevices::Streams::kNone);
  FakeHorovod::Settings settings;
  settings.size = 2;
  settings.memory = [&](Rank rank) -> Memory& { return rank == 0 ? devices[0] : Memory::Host(); };
  FakeJob job;
  job.Start(std::move(settings), {Config(1)});
  for (const Rank rank : {0, 1}) job.At(rank).Arrive(0);
  job.Cycle();
  for (const Rank rank : {0, 1})
    EXPECT_THAT([&] { job.At(rank).Wait(0); },
                ThrowsMessage<EngineError>(AllOf(HasSubstr("specified device GPU"), HasSubstr("specified device CPU"),
                                                 HasSubstr("(rank 0 and rank 1)"))));
  EXPECT_EQ(job.horovod().complaint(), "");
}

}  // namespace
}  // namespace horovod_partial::test
