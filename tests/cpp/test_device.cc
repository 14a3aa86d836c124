// Buckets on a make-believe device: what it refuses and loses, one thing at a time. That rounds are right there is
// tested by test_threads and test_engine, whose jobs lie on such devices too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "harness/application.h"
#include "harness/fake_device.h"
#include "harness/fake_horovod.h"
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
class Pair {
 public:
  explicit Pair(const Kind& kind) : kind_(kind), devices_(2, FakeDevices::Streams::kNone), horovod_(MakeSettings()) {
    for (Rank rank = 0; rank < 2; ++rank)
      ranks_.push_back(std::make_unique<Application>(horovod_, rank, std::vector{kind_.config}));
  }
  ~Pair() {
    horovod_.Shutdown();
    Cycle();
  }

  FakeDevice& device(Rank rank) { return devices_[rank]; }
  FakeHorovod& horovod() { return horovod_; }
  Application& operator[](Rank rank) { return *ranks_.at(static_cast<std::size_t>(rank)); }
  // Reductions end so many cycles after they began.
  void RunOnDevices(int cycles) { device_cycles_ = cycles; }
  void Cycle() {
    horovod_.Cycle(random_, [] {});
  }
  void Wait(Application& rank) {
    while (horovod_.IsAlive(rank.rank()) && !rank.IsDone(0)) Cycle();
    rank.Wait(0);
  }
  std::string complaint() const { return horovod_.complaint(); }

  void RunRoundZero() {
    for (auto& rank : ranks_) rank->Arrive(0);
    for (auto& rank : ranks_) Wait(*rank);
  }
  // Rank 1 comes after rounds, and while others run, then has missed two, and comes twice before it takes a result; all
  // is delivered and taken. Now and then its device makes the contribution only when it has been asked some times.
  void Train() {
    for (const int cycles : {0, 0, 2, 2}) {
      RunOnDevices(cycles);
      ranks_[0]->Arrive(0);
      Cycle();
      ranks_[1]->Arrive(0, true, cycles + 1);
      for (auto& rank : ranks_) Wait(*rank);
    }
    for (int round = 0; round < 2 && kind_.partial; ++round) {
      ranks_[0]->Arrive(0);
      Wait(*ranks_[0]);
    }
    if (kind_.partial) {
      ArriveTwice();
      ranks_[0]->Arrive(0);
      Wait(*ranks_[0]);
    }
    std::vector<std::future<void>> ends;
    for (auto& rank : ranks_)
      ends.push_back(std::async(std::launch::async, [this, &rank] {
        WaitForEnd(horovod_.engine(rank->rank()));
        rank->Collect();
      }));
    for (auto& end : ends)
      while (end.wait_for(0s) != std::future_status::ready) Cycle();
    for (auto& end : ends) end.get();
  }

 private:
  FakeHorovod::Settings MakeSettings() {
    FakeHorovod::Settings settings;
    settings.size = 2;
    settings.clock = [](Rank) { return Now() + 1h; };  // whoever waits has waited for long
    settings.memory = [this](Rank rank) -> Memory& { return devices_[rank]; };
    settings.device_cycles = [this](Rank) { return device_cycles_; };
    return settings;
  }
  void ArriveTwice() {
    Application& rank = *ranks_[1];
    for (int arrival = 0; arrival < 2; ++arrival) {
      rank.Arrive(0);
      while (horovod_.IsAlive(1) && !rank.IsDone(0)) Cycle();
      horovod_.engine(1).Wait(*rank.At(0).handle, *rank.At(0).operation);
      Cycle();
    }
  }

  const Kind kind_;
  FakeDevices devices_;
  int device_cycles_ = 0;
  FakeHorovod horovod_;
  std::vector<std::unique_ptr<Application>> ranks_;
  Random random_{1};
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
    return pair.complaint().empty() ? failure : pair.complaint();
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
  FakeDevices devices(2, FakeDevices::Streams::kNone);
  for (int generation = 0; generation < 2; ++generation) {
    FakeHorovod::Settings settings;
    settings.size = 2;
    settings.clock = [](Rank) { return Now() + 1h; };
    settings.memory = [&](Rank rank) -> Memory& { return devices[rank]; };
    settings.device_cycles = [&](Rank) { return generation == 0 ? 2 : 0; };
    FakeHorovod horovod(std::move(settings));
    Application first(horovod, 0, {Config(1)});
    Application second(horovod, 1, {Config(1)});
    Random random(1);
    const auto wait = [&](Application& rank) {
      while (!rank.IsDone(0)) horovod.Cycle(random, [] {});
      rank.Wait(0);
    };
    first.Arrive(0);
    second.Arrive(0);
    wait(first);
    wait(second);
    for (int round = 0; round < 2; ++round) {
      first.Arrive(0);
      wait(first);
    }
    second.Arrive(0);
    wait(second);
    EXPECT_EQ(second.At(0).got.back().info.staleness, 2);
    first.Arrive(0);
    horovod.Cycle(random, [] {});
    EXPECT_EQ(first.IsDone(0), generation > 0);
    horovod.Shutdown();
    horovod.Cycle(random, [] {});
    EXPECT_EQ(horovod.complaint(), "");
  }
}

// Its number too: what another member of a family has of that round is gone.
TEST(DevicesTest, ARankThatJoinsWhileARoundRunsTakesNothingOfIt) {
  const Watchdog watchdog("a join");
  Pair pair({"Replay", Config(1, Missed::kReplay)});
  pair.RunRoundZero();
  pair.RunOnDevices(3);
  pair[0].Arrive(0);
  pair.Cycle();
  EXPECT_FALSE(pair[0].IsDone(0));
  pair.horovod().Join(1);
  pair.Wait(pair[0]);
  EXPECT_FALSE(pair.horovod().engine(1).families().HasRound({BucketName(0)}));
  pair.horovod().Join(0);
  while (pair.horovod().IsJoining(0)) pair.Cycle();
  for (const Rank rank : {0, 1}) pair[rank].Arrive(0);
  for (const Rank rank : {0, 1}) pair.Wait(pair[rank]);
  EXPECT_EQ(pair[1].At(0).got.back().results, pair[0].At(0).got.back().results);
  EXPECT_EQ(pair.complaint(), "");
}

TEST(DevicesTest, AJobOnHostsAndDevicesIsRefusedByName) {
  const Watchdog watchdog("a mixed job");
  FakeDevices devices(1, FakeDevices::Streams::kNone);
  FakeHorovod::Settings settings;
  settings.size = 2;
  settings.memory = [&](Rank rank) -> Memory& { return rank == 0 ? devices[0] : Memory::Host(); };
  FakeHorovod horovod(std::move(settings));
  Application first(horovod, 0, {Config(1)});
  Application second(horovod, 1, {Config(1)});
  Random random(1);
  first.Arrive(0);
  second.Arrive(0);
  horovod.Cycle(random, [] {});
  for (Application* rank : {&first, &second}) {
    try {
      rank->Wait(0);
      ADD_FAILURE() << "it was accepted";
    } catch (const EngineError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("specified device GPU"), HasSubstr("specified device CPU"),
                                      HasSubstr("(rank 0 and rank 1)")));
    }
  }
  EXPECT_EQ(horovod.complaint(), "");
}

}  // namespace
}  // namespace horovod_partial::test
