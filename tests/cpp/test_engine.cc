// Single cases of the engine, each under a script of its own. With HOROVOD_PARTIAL_TEST_ON_DEVICES the tensors of ranks
// lie on make-believe devices.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/shared_bucket.h"
#include "harness/application.h"
#include "harness/fake_horovod.h"
#include "harness/fake_job.h"
#include "harness/others.h"
#include "harness/policies.h"
#include "harness/threads.h"

namespace horovod_partial::test {
namespace {

using namespace std::chrono_literals;
using testing::_;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Return;
using testing::ThrowsMessage;

// --- Ranks in one process

class RanksTest : public testing::Test, protected FakeJob {
 protected:
  void Start(int size, const std::vector<BucketConfig>& configs, FakeHorovod::Settings settings = {},
             std::shared_ptr<FakeDevices> devices = nullptr) {
    settings.size = size;
    settings.clock = [](Rank) { return Now() + 1h; };  // whoever waits has waited for long
    const bool on_devices = std::getenv("HOROVOD_PARTIAL_TEST_ON_DEVICES") != nullptr;
    if (on_devices && devices == nullptr) devices = std::make_shared<FakeDevices>(size, FakeDevices::Streams::kNone);
    FakeJob::Start(std::move(settings), configs, std::move(devices));
  }
  // Where `breaks` says so, the cable is cut in a reduction.
  static FakeHorovod::Settings Breaking(std::function<bool(const Closing&, Rank)> breaks) {
    FakeHorovod::Settings settings;
    settings.fault = [breaks = std::move(breaks)](const Closing& closing, Rank rank) {
      return breaks(closing, rank) ? kBroken : "";
    };
    return settings;
  }
  void StartAndRunRoundZero(int size, const std::vector<BucketConfig>& configs, FakeHorovod::Settings settings = {}) {
    Start(size, configs, std::move(settings));
    RunRoundZero();
  }
  void TearDown() override {
    EXPECT_EQ(horovod().complaint(), "");
    Shutdown();
  }

  // What a rank does alone, where it is a quorum.
  void Step(Rank rank) {
    At(rank).Arrive(0);
    Cycle();
    At(rank).Wait(0);
  }
  // These ranks arrive, and are reported in the same cycle.
  void ArriveTogether(const Members& ranks) {
    for (const Rank rank : ranks) At(rank).Arrive(0);
    Cycle();
  }
  // Ranks that have joined are back.
  void JoinTogether(const Members& ranks) {
    for (const Rank rank : ranks) horovod().Join(rank);
    Cycle();
  }
  // Rank 1 comes late to rank 0's step, and so its contribution is pending.
  void StepWithoutRank1() {
    Step(0);
    At(1).Arrive(0);
    At(1).Wait(0);
  }
  // A cycle in which something happens as soon as `when` holds between two steps of the background.
  void CycleAnd(const std::function<bool()>& when, const std::function<void()>& body) {
    bool happened = false;
    Cycle([&] {
      if (happened || !when()) return;
      happened = true;
      body();
    });
    ASSERT_TRUE(happened);
  }
  // Flushes of these ranks.
  std::vector<std::future<void>> BeginFlushes(const Members& ranks) {
    std::vector<std::future<void>> flushes;
    for (const Rank rank : ranks) flushes.push_back(Begin([this, rank] { WaitForFlush(EngineOf(rank)); }));
    return flushes;
  }
  // A rank that has no other news: until it wants to say that it waits.
  void AwaitWaiting(Rank rank) {
    while (!EngineOf(rank).WantsCycle(Now() + 1h, kNever)) std::this_thread::yield();
  }

  bool Runs(Rank rank) {
    const auto handle = EngineOf(rank).buckets().Find(BucketName(0));
    std::lock_guard<std::mutex> lock(handle->mutex);
    return handle->core.state() == Bucket::State::kRunning;
  }
  static bool HasPending(const SharedBucket& handle) {
    std::lock_guard<std::mutex> lock(handle.mutex);
    return handle.core.HasPending();
  }
  // The sum of what these ranks have submitted to bucket 0.
  Floats SubmittedBy(const Members& ranks) {
    Floats submitted(kElements);
    for (const Rank rank : ranks) AddTo(submitted, At(rank).At(0).submitted);
    return submitted;
  }

  static constexpr const char* kBroken = "the cable was cut";
  const Watchdog watchdog_{testing::UnitTest::GetInstance()->current_test_info()->name()};
};

// --- Work sharing

class SharingRanksTest : public RanksTest {
 protected:
  static constexpr int kRanks = 3;
  static constexpr int kEach = 2;
  static constexpr float kAll = kRanks * kEach;

  // One rank's training. Each micro-batch is a 1 in both buckets.
  struct Training {
    Engine& engine;
    Tensor keeper, other;
    FakeDevice* stream = nullptr;  // the device that makes the gradients, behind the application's back
    int updates = 0;
    int made = 0;     // micro-batches
    int in_open = 0;  // of the open update
    std::vector<float> sums = {};

    void Take() {
      while (const auto taken = engine.families().TakeRound({"keeper", "other"}, {keeper.data(), other.data()})) {
        if (*taken == 0) continue;
        EXPECT_EQ(keeper.values(), other.values());
        sums.push_back(keeper.values()[0]);
        ++updates;
        in_open = 0;
      }
    }
    void Make() {
      ++made;
      ++in_open;
      const Floats sum(kElements, static_cast<float>(in_open));
      for (auto& [name, tensor] : {std::pair<const char*, Tensor&>("other", other), {"keeper", keeper}}) {
        const auto make = [target = &tensor, sum] { target->Set(sum); };
        auto ready = stream == nullptr ? nullptr : stream->Record(make);
        if (ready == nullptr) make();
        engine.Arrive(engine.buckets().Find(name), {tensor.data(), tensor.data(), 1}, std::move(ready));
      }
    }
    // Until so many updates have been made, or so many micro-batches here.
    void Run(int most_updates, int most_made = 1000) {
      while (updates < most_updates && made < most_made) {
        if (engine.sharing().Next({"keeper", "other"}, true)) {
          Make();
        } else {
          Take();
        }
      }
    }
    void Flush() {
      Engine::Flushing flushing(engine, Report::Flush::kFlushing, {{"keeper", "other"}});
      while (flushing.Wait()) Take();
      Take();
    }
  };

  void StartSharing(FakeHorovod::Settings settings = {}, std::shared_ptr<FakeDevices> streams = nullptr) {
    Start(kRanks, {}, std::move(settings), streams);
    for (Rank rank = 0; rank < kRanks; ++rank) {
      Memory& memory = horovod().memory(rank);
      for (const bool grants : {true, false}) {
        BucketConfig config = SharedConfig(kRanks, kEach, grants);
        config.memory = &memory;
        EngineOf(rank).buckets().Declare(grants ? "keeper" : "other", config);
      }
      FakeDevice* const stream = streams == nullptr ? nullptr : &(*streams)[rank];
      trainings_.push_back(
          std::make_unique<Training>(Training{EngineOf(rank), Tensor(memory), Tensor(memory), stream}));
    }
  }
  void Run(const std::function<void(Rank, Training&)>& body) {
    OnAllRanks([&](Rank rank) { body(rank, *trainings_[static_cast<std::size_t>(rank)]); });
  }

  std::vector<std::unique_ptr<Training>> trainings_;
};

TEST_F(SharingRanksTest, EachUpdateHasAllMicroBatches) {
  StartSharing();
  Run([](Rank, Training& training) {
    training.Run(20);
    training.Flush();
  });
  int made = 0;
  for (const auto& training : trainings_) {
    EXPECT_EQ(training->sums, Floats(20, kAll));
    made += training->made;
  }
  EXPECT_EQ(made, 20 * kRanks * kEach);
}

TEST_F(SharingRanksTest, DevicesMakeGradientsBehindTheHosts) {
  StartSharing({}, std::make_shared<FakeDevices>(kRanks, FakeDevices::Streams::kOwn));
  Run([](Rank, Training& training) {
    training.Run(50);
    training.Flush();
  });
  for (const auto& training : trainings_) EXPECT_EQ(training->sums, Floats(50, kAll));
}

// The thresholds are too long for a wait to ask for a cycle.
TEST_F(SharingRanksTest, WhoHasMadeAllThatItHoldsAsksForACycle) {
  FakeHorovod::Settings settings;
  settings.thresholds = {1000h, 1000h, 1000h};
  StartSharing(std::move(settings));
  Run([](Rank rank, Training& training) {
    std::minstd_rand random(static_cast<unsigned>(rank) + 1);
    while (training.updates < 100) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 8 == 0 ? random() % 2000 : random() % 100));
      training.Run(100, training.made + 1);
    }
  });
  for (const auto& training : trainings_) EXPECT_EQ(training->sums, Floats(100, kAll));
}

TEST_F(SharingRanksTest, OthersMakeWhatARankThatFlushesDoesNot) {
  StartSharing();
  Run([](Rank rank, Training& training) {
    training.Run(20, rank == 0 ? 3 : 1000);
    training.Flush();
  });
  for (const auto& training : trainings_) EXPECT_EQ(training->sums, Floats(20, kAll));
}

TEST_F(SharingRanksTest, AnUpdateIsShortWhereAllRanksFlush) {
  StartSharing();
  Run([](Rank rank, Training& training) {
    training.Run(1);
    if (rank == 1) training.Run(2, training.made + 1);
    training.Flush();
  });
  for (const auto& training : trainings_) EXPECT_EQ(training->sums, (Floats{kAll, 1}));
}

TEST_F(SharingRanksTest, WhoHasJoinedBeforeTheFirstUpdateMakesItsOwnThen) {
  StartSharing();
  JoinTogether({0, 1, 2});
  Run([](Rank, Training& training) { training.Run(2); });
  for (const auto& training : trainings_) EXPECT_EQ(training->sums, Floats(2, kAll));
}

TEST_F(SharingRanksTest, WhoWaitsForAMicroBatchHearsOfAShutdown) {
  StartSharing();
  Run([](Rank rank, Training& training) { training.Run(1, rank == 0 ? 1 : 2); });
  auto waiting = Begin([&] {
    EXPECT_THROW(
        {
          while (true) trainings_[1]->engine.sharing().Next({"keeper", "other"}, true);
        },
        EngineError);
  });
  Cycle();
  Shutdown();
  waiting.get();
}

// --- Arrivals

TEST_F(RanksTest, ALateArrivalGetsTheResultAtOnce) {
  StartAndRunRoundZero(2, {Config(1)});
  Step(0);
  At(1).Arrive(0);
  EXPECT_TRUE(At(1).IsDone(0));
  At(1).Wait(0);
  const RoundInfo& info = At(1).At(0).got.back().info;
  EXPECT_TRUE(info.late);
  EXPECT_EQ(info.round, 1);
  EXPECT_EQ(info.staleness, 1);
  EXPECT_EQ(info.fresh, 1);
  EXPECT_EQ(info.gradients, 1);
  EXPECT_EQ(At(1).Total(0), At(0).Total(0));
  EXPECT_TRUE(HasPending(*At(1).At(0).handle));
}

TEST_F(RanksTest, ASlowDeviceDoesNotMakeTheOthersWait) {
  StartAndRunRoundZero(2, {Config(1)});
  At(1).Arrive(0, true, 100);  // the hooks run ahead of the device
  ArriveTogether({0});
  EXPECT_TRUE(At(0).IsDone(0));
  EXPECT_EQ(LastRound().closing.reason, Closing::Reason::kQuorum);
  EXPECT_FALSE(LastRound().closing.contributions[1].fresh);
  EXPECT_FALSE(At(1).IsDone(0)) << "it has not come yet";
  for (const Rank rank : {0, 1}) Wait(rank);
  EXPECT_TRUE(At(1).At(0).got.back().info.late);
  EXPECT_EQ(At(1).Total(0), At(0).Total(0));
  EXPECT_TRUE(HasPending(*At(1).At(0).handle));
}

TEST_F(RanksTest, AnArrivalCountsFromWhenItsDeviceIsReady) {
  StartAndRunRoundZero(2, {Config(2)});
  At(0).Arrive(0, true, 100);
  At(1).Arrive(0);
  Cycle();
  EXPECT_EQ(Rounds(), 1u);
  for (const Rank rank : {0, 1}) Wait(rank);
  EXPECT_FALSE(At(0).At(0).got.back().info.late);
  EXPECT_EQ(At(0).Total(0), At(1).Total(0));
  EXPECT_EQ(At(0).Total(0), SubmittedBy({0, 1}));
}

TEST_F(RanksTest, AShutdownEndsWaitsForADevice) {
  StartAndRunRoundZero(2, {Config(1)});
  At(0).Arrive(0, true, 1 << 30);
  EngineOf(0).Close("shut down");
  EXPECT_THROW(At(0).Wait(0), EngineError);
}

// --- Flush, end and deliver

TEST_F(RanksTest, AFlushReturnsWhenEveryBucketHasBeenDelivered) {
  StartAndRunRoundZero(3, {Config(1), Config(1), Config(1), Config(1)});
  for (int bucket = 0; bucket < 4; ++bucket) At(0).Arrive(bucket);
  Cycle();
  for (int bucket = 0; bucket < 4; ++bucket) {
    At(0).Wait(bucket);
    At(1).Arrive(bucket);  // late
    At(1).Wait(bucket);
  }
  std::vector<std::future<void>> threads;
  std::atomic<int> early{0};
  for (Rank rank = 0; rank < 3; ++rank) {
    threads.push_back(Begin([&, rank] {
      WaitForFlush(EngineOf(rank));
      for (int bucket = 0; bucket < 4; ++bucket) {
        const SharedBucket& handle = *At(rank).At(bucket).handle;
        std::lock_guard<std::mutex> lock(handle.mutex);
        if (handle.core.state() != Bucket::State::kIdle || handle.core.HasPending()) ++early;
      }
    }));
  }
  // With time for the flushing threads between any two steps.
  while (Rounds() < 12) Cycle([] { std::this_thread::sleep_for(100us); });
  CycleUntilDone(std::move(threads));
  EXPECT_EQ(early, 0);
  for (Rank rank = 0; rank < 3; ++rank) {
    At(rank).Collect();
    for (int bucket = 0; bucket < 4; ++bucket) EXPECT_EQ(At(rank).Total(bucket), At(0).Total(bucket));
  }
  EXPECT_EQ(LastRound().closing.reason, Closing::Reason::kFlush);
}

TEST_F(RanksTest, AFlushWhileOthersEndDoesNotEndThem) {
  StartAndRunRoundZero(2, {Config(1)});
  std::atomic<bool> ended{false};
  std::vector<std::future<void>> threads;
  threads.push_back(Begin([&] {
    WaitForEnd(EngineOf(0));
    ended = true;
  }));
  CycleUntilDone(BeginFlushes({1}));
  for (int i = 0; i < 20; ++i) Cycle();
  EXPECT_FALSE(ended);
  threads.push_back(Begin([&] { WaitForEnd(EngineOf(1)); }));
  CycleUntilDone(std::move(threads));
}

// Behind a flush, where a faster rank trains again: what was missed is not left for the next arrival.
TEST_F(RanksTest, CollectingWaitsForARoundThatRuns) {
  StartAndRunRoundZero(2, {Config(1)});
  Step(0);
  At(0).Arrive(0);
  std::future<void> collecting;
  CycleAnd([&] { return Runs(1); },
           [&] {
             collecting = Begin([&] { At(1).Collect(); });
             EXPECT_EQ(collecting.wait_for(20ms), std::future_status::timeout);
           });
  CycleUntilDone(std::move(collecting));
  EXPECT_EQ(At(1).Total(0), SubmittedBy({0, 1}));
  At(0).Wait(0);
}

TEST_F(RanksTest, DeliverSendsWhatIsPendingAndKeepsTheResults) {
  StartAndRunRoundZero(2, {Config(1)});
  StepWithoutRank1();
  ASSERT_TRUE(HasPending(*At(1).At(0).handle));
  CycleUntilDone(Begin([&] { EngineOf(1).Deliver(); }));
  EXPECT_EQ(LastRound().closing.gradients(), 1);
  EXPECT_FALSE(HasPending(*At(1).At(0).handle));
  for (const Rank rank : {0, 1}) At(rank).Collect();
  EXPECT_EQ(At(0).Total(0), At(1).Total(0));
}

TEST_F(RanksTest, DeliverWaitsForWhatIsOutstandingFirst) {
  StartAndRunRoundZero(2, {Config(2)});
  At(1).Arrive(0);
  auto deliver = Begin([&] { EngineOf(1).Deliver(); });
  for (int i = 0; i < 3; ++i) Cycle();
  EXPECT_EQ(deliver.wait_for(0s), std::future_status::timeout);
  At(0).Arrive(0);
  CycleUntilDone(std::move(deliver));
  EXPECT_TRUE(At(1).IsDone(0));
}

// --- Joined ranks

TEST_F(RanksTest, ABucketMayBeFirstUsedWhileARankHasJoined) {
  Start(3, {Config(3)});
  horovod().Join(2);
  for (int step = 0; step < 2; ++step) {
    ArriveTogether({0, 1});
    EXPECT_EQ(LastRound().closing.fresh(), 2);
    for (const Rank rank : {0, 1}) At(rank).Wait(0);
  }
  JoinTogether({0, 1});
  for (const Rank rank : {0, 1, 2}) EXPECT_FALSE(horovod().IsJoining(rank));
  RunRoundZero();
  EXPECT_EQ(LastRound().closing.fresh(), 3);
  EXPECT_EQ(LastRound().closing.error, "");
  EXPECT_EQ(At(0).At(0).got.back().results, At(2).At(0).got.back().results);
}

TEST_F(RanksTest, ARankThatDoesNotKnowABucketSendsZeros) {
  Start(2, {Config(1)});
  horovod().Join(1);
  Step(0);
  JoinTogether({0});
  Step(0);
  EXPECT_EQ(LastRound().closing.fresh(), 1);
  EXPECT_EQ(At(0).Total(0), At(0).At(0).submitted);
}

// --- Errors

TEST_F(RanksTest, AnErrorInTheReductionPoisonsTheBucket) {
  Start(2, {Config(1), Config(1)},
        Breaking([](const Closing& closing, Rank) { return closing.bucket == BucketName(0) && closing.round == 1; }));
  RunRoundZero();
  ArriveTogether({0});
  EXPECT_THAT([&] { At(0).Wait(0); }, ThrowsMessage<EngineError>(kBroken));
  for (const Rank rank : {0, 1}) {
    EXPECT_THAT([&] { At(rank).Arrive(0); }, ThrowsMessage<EngineError>(kBroken));
    EXPECT_THROW(EngineOf(rank).Collect(At(rank).At(0).handle, At(rank).At(0).output.data()), EngineError);
  }
  for (const Rank rank : {0, 1}) At(rank).Arrive(1);
  Cycle();
  for (const Rank rank : {0, 1}) At(rank).Wait(1);  // the other bucket goes on
  EXPECT_EQ(At(0).Total(1), At(1).Total(1));
  CycleUntilDone(BeginFlushes({0, 1}));
}

TEST_F(RanksTest, AnErrorReachesWhoCameWhileTheRoundWasRunning) {
  StartAndRunRoundZero(2, {Config(1)}, Breaking([](const Closing& closing, Rank) { return closing.round == 1; }));
  At(0).Arrive(0);
  CycleAnd([&] { return Runs(1); }, [&] { At(1).Arrive(0); });
  EXPECT_THAT([&] { At(1).Wait(0); }, ThrowsMessage<EngineError>(kBroken));
}

TEST_F(RanksTest, AnErrorOnOneRankDoesNotStopTheOthers) {
  StartAndRunRoundZero(2, {Config(1)},
                       Breaking([](const Closing& closing, Rank rank) { return closing.round == 1 && rank == 1; }));
  for (int step = 0; step < 3; ++step) Step(0);
  EXPECT_THAT([&] { At(1).Arrive(0); }, ThrowsMessage<EngineError>(kBroken));
}

TEST_F(RanksTest, RanksThatDisagreeGetTheSameErrorAndTheNameIsFreeAgain) {
  Start(3, {Config(1)});
  std::vector<Floats> values(3, Floats(kElements));
  const auto arrive = [&](Rank rank, int quorum) {
    float* data = values[static_cast<std::size_t>(rank)].data();
    const auto handle = EngineOf(rank).buckets().Declare("disputed", Config(quorum));
    return std::pair(handle, EngineOf(rank).Arrive(handle, {data, data, 1}));
  };
  auto arrivals = std::vector{arrive(0, 1), arrive(1, 1), arrive(2, 2)};
  const auto wait = [&](Rank rank) {
    const auto& arrival = arrivals[static_cast<std::size_t>(rank)];
    EngineOf(rank).Wait(*arrival.first, *arrival.second);
  };
  Cycle();
  const auto names_both = AllOf(HasSubstr("rank 0 asked for Quorum(1)"), HasSubstr("rank 2 asked for Quorum(2)"));
  for (const Rank rank : {0, 1, 2}) {
    EXPECT_THAT([&] { wait(rank); }, ThrowsMessage<EngineError>(names_both));
    EXPECT_EQ(EngineOf(rank).buckets().Find("disputed"), nullptr);
  }
  arrivals = {arrive(0, 2), arrive(1, 2), arrive(2, 2)};
  Cycle();
  for (const Rank rank : {0, 1, 2}) EXPECT_NO_THROW(wait(rank));
}

TEST_F(RanksTest, ABucketThatNobodyElseWillUseIsRefused) {
  Start(2, {Config(1), Config(1)});
  ArriveTogether({0, 1});
  for (const Rank rank : {0, 1}) At(rank).Wait(0);
  auto ending = Begin([&] { WaitForEnd(EngineOf(1)); });
  At(0).Arrive(1);
  EXPECT_THAT([&] { Wait(0, 1); }, ThrowsMessage<EngineError>(HasSubstr("will ever use this bucket")));
  auto last = Begin([&] { WaitForEnd(EngineOf(0)); });
  CycleUntilDone(std::move(ending));
  CycleUntilDone(std::move(last));
}

TEST_F(RanksTest, ANameThatIsInUseIsRefused) {
  Start(2, {Config(1)});
  At(0).Arrive(0);
  EXPECT_THAT([&] { At(0).Arrive(0); },
              ThrowsMessage<std::invalid_argument>(AllOf(HasSubstr("rank 0"), HasSubstr("bucket.0 is in use"))));
}

TEST_F(RanksTest, ANameKeepsWhatItWasDeclaredWith) {
  Start(2, {Config(1)});
  EngineOf(0).buckets().Declare("name", Config(1));
  EXPECT_NO_THROW(EngineOf(0).buckets().Declare("name", Config(1)));
  std::vector<BucketConfig> others(3, Config(1));
  others[0].shape = {6};
  others[1].shape = {5, 1};
  others[2].type = DataType::kFloat64;
  for (BucketSpec& spec : Others(Config(1).spec)) {
    others.push_back(Config(1));
    others.back().spec = std::move(spec);
  }
  for (const BucketConfig& other : others)
    EXPECT_THAT([&] { EngineOf(0).buckets().Declare("name", other); },
                ThrowsMessage<std::invalid_argument>(HasSubstr("is bound to another")))
        << &other - others.data();
}

TEST_F(RanksTest, MoreElementsThanHorovodCountsAreRefused) {
  Start(2, {Config(1)});
  BucketConfig config = Config(1);
  config.shape = {(1LL << 31) - 1};
  EXPECT_NO_THROW(EngineOf(0).buckets().Declare("fits", config));
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{1LL << 31}, {1LL << 16, 1LL << 16, 2}}) {
    config.shape = shape;
    EXPECT_THAT([&] { EngineOf(0).buckets().Declare("too large", config); },
                ThrowsMessage<std::invalid_argument>(
                    AllOf(HasSubstr("rank 0"), HasSubstr("too large has"), HasSubstr("up to 2147483647"))));
  }
}

// --- The end of Horovod

TEST_F(RanksTest, AShutdownInTheMiddleOfAWaitEndsIt) {
  StartAndRunRoundZero(3, {Config(2), Config(2)});
  At(0).Arrive(0);
  std::vector<std::future<void>> threads;
  threads.push_back(Begin([&] { EXPECT_THROW(At(0).Wait(0), EngineError); }));
  threads.push_back(Begin([&] { EXPECT_THROW(WaitForFlush(EngineOf(1)), EngineError); }));
  for (int i = 0; i < 3; ++i) Cycle();
  Shutdown();
  CycleUntilDone(std::move(threads));
  for (const Rank rank : {0, 1, 2}) {
    EXPECT_THROW(At(rank).Arrive(0), EngineError) << "also a bucket that waited for nothing";
    EXPECT_THROW(At(rank).Arrive(1), EngineError);
    EXPECT_THROW(WaitForFlush(EngineOf(rank)), EngineError);
  }
}

TEST_F(RanksTest, ARoundThatIsUnderWayComesBeforeAShutdown) {
  StartAndRunRoundZero(2, {Config(1)});
  At(0).Arrive(0);
  CycleAnd([&] { return Runs(1); },
           [&] {
             At(1).Arrive(0);
             horovod().Shutdown();
           });
  Cycle();
  At(1).Wait(0);
  EXPECT_THROW(At(1).Arrive(0), EngineError);
}

TEST_F(RanksTest, AClosedGenerationEndsEveryWaitAndTakesNothingNew) {
  Start(2, {Config(2)});
  At(0).Arrive(0);
  auto waiting = Begin([&] { EXPECT_THAT([&] { At(0).Wait(0); }, ThrowsMessage<EngineError>("a new generation")); });
  EngineOf(0).Close("a new generation");
  waiting.get();
  EXPECT_THAT([&] { At(0).Arrive(0); }, ThrowsMessage<EngineError>("a new generation"));
  EXPECT_THAT([&] { EngineOf(0).buckets().Declare("another", Config(1)); },
              ThrowsMessage<EngineError>("a new generation"));
}

TEST_F(RanksTest, AFlushDoesNotWaitForARankThatHasUsedNoBucket) {
  Start(2, {Config(1)});
  horovod().Join(1);
  Step(0);
  JoinTogether({0});
  WaitForFlush(EngineOf(1));  // it has nothing to deliver, and returns at once
  CycleUntilDone(BeginFlushes({0}));
}

// A rank that had joined in round 0 comes to a later round, when its report has been sent: what it does not know of is
// not declared by it.
TEST_F(RanksTest, ARankThatSlipsIntoALaterRoundStillDeclares) {
  Start(3, {Config(1)});
  horovod().Join(2);
  ArriveTogether({0, 1});
  for (const Rank rank : {0, 1}) At(rank).Wait(0);
  JoinTogether({0, 1});
  At(0).Arrive(0);
  CycleAnd([&] { return Rounds() == 2; }, [&] { At(2).Arrive(0); });
  At(0).Wait(0);
  Cycle();
  At(2).Wait(0);
  auto flushes = BeginFlushes({0, 1});
  for (const Rank rank : {0, 1}) AwaitWaiting(rank);
  for (int i = 0; i < 5; ++i) Cycle();
  ASSERT_EQ(flushes[0].wait_for(0s), std::future_status::timeout) << "rank 2 has not come";
  CycleUntilDone(BeginFlushes({2}));
  CycleUntilDone(std::move(flushes));
}

// --- Families

class FamilyTest : public RanksTest {
 protected:
  void StartFamily() { StartAndRunRoundZero(2, {Config(1, Missed::kReplay), Config(1, Missed::kReplay)}); }
  // Rank 0 is a quorum, and so runs a round in both members.
  void RunRoundOfRank0() {
    for (const int bucket : {0, 1}) At(0).Arrive(bucket);
    Cycle();
  }
  Round CompletedOf(Rank rank, int bucket) {
    const auto handle = EngineOf(rank).buckets().Find(BucketName(bucket));
    std::lock_guard<std::mutex> lock(handle->mutex);
    return handle->core.completed();
  }
  // How many gradients were in the round that was taken; -1 for no round.
  int Take(Rank rank) {
    Tensor first(horovod().memory(rank));
    Tensor second(horovod().memory(rank));
    const auto taken = EngineOf(rank).families().TakeRound(family_, {first.data(), second.data()});
    if (!taken) return -1;
    first_ = first.values();
    second_ = second.values();
    return *taken;
  }
  const Family family_ = {BucketName(0), BucketName(1)};
  Floats first_;  // of the last round that was taken
  Floats second_;
};

TEST_F(FamilyTest, ARoundIsTakenWhenItHasEndedInAllMembers) {
  StartFamily();
  ArriveTogether({0});
  EXPECT_FALSE(EngineOf(1).families().HasRound(family_));
  EXPECT_EQ(Take(1), -1);
  At(0).Arrive(1);
  Cycle();
  EXPECT_TRUE(EngineOf(1).families().HasRound(family_));
  EXPECT_EQ(Take(1), 2);
  EXPECT_EQ(first_, Contribution(0, 0, 1));
  EXPECT_EQ(second_, Contribution(0, 1, 1));
  EXPECT_FALSE(EngineOf(1).families().HasRound(family_));
}

TEST_F(FamilyTest, OnlyALateRankWritesWhereTheDeviceMayStillWork) {
  StartFamily();
  RunRoundOfRank0();
  int writes = 0;
  const auto take = [&](Rank rank) {
    const std::vector<void*> outputs = {At(rank).At(0).input.data(), At(rank).At(1).input.data()};
    return EngineOf(rank).families().TakeRound(family_, outputs, [&] { ++writes; });
  };
  EXPECT_EQ(take(0), 2);
  EXPECT_EQ(take(0), std::nullopt);
  EXPECT_EQ(writes, 0) << "the results lie where the arrivals wanted them";
  EXPECT_EQ(take(1), 2);
  EXPECT_EQ(writes, 1);
}

TEST_F(FamilyTest, ARankThatJoinsBeforeItsFirstStepIsInTheFlushAfterIt) {
  Start(3, {Config(1, Missed::kReplay), Config(1, Missed::kReplay)});
  BucketConfig config = Config(1, Missed::kReplay);
  config.memory = &horovod().memory(2);
  for (const int bucket : {0, 1}) EngineOf(2).buckets().Declare(BucketName(bucket), config);
  horovod().Join(2);
  for (int step = 0; step < 2; ++step) {
    for (const Rank rank : {0, 1})
      for (const int bucket : {0, 1}) At(rank).Arrive(bucket);
    Cycle();
    for (const Rank rank : {0, 1}) Take(rank);
  }
  for (const Rank rank : {0, 1}) horovod().Join(rank);
  Cycle();
  CycleUntilDone(BeginFlushes({0, 1, 2}));
  for (const int bucket : {0, 1}) EXPECT_EQ(CompletedOf(2, bucket), CompletedOf(0, bucket));
  EXPECT_EQ(EngineOf(2).families().Lost(family_), 2);
  EXPECT_EQ(EngineOf(0).families().Lost(family_), 0);
}

TEST_F(FamilyTest, ARankThatComesAfterOthersHasLostTheirRounds) {
  Start(2, {Config(1, Missed::kReplay), Config(1, Missed::kReplay)});
  horovod().Join(1);
  for (const int bucket : {0, 1}) At(0).Arrive(bucket);
  Cycle();
  Take(0);
  horovod().Join(0);
  Cycle();
  RunRoundZero();
  EXPECT_EQ(EngineOf(1).families().Lost(family_), 1);
}

TEST_F(FamilyTest, AFamilyThatIsNotThereHasNoRound) {
  StartFamily();
  EXPECT_FALSE(EngineOf(1).families().HasRound({}));
  EXPECT_FALSE(EngineOf(1).families().HasRound({BucketName(0), "unknown"}));
}

TEST_F(FamilyTest, AFlushTakesNothingThatComesBehindIt) {
  StartFamily();
  Engine::Flushing flushing(EngineOf(1), Report::Flush::kFlushing, {family_});
  auto other = Begin([&] { WaitForFlush(EngineOf(0)); });
  auto own = Begin([&] {
    while (flushing.Wait()) EXPECT_EQ(Take(1), 0) << "nothing was pending";
  });
  CycleUntilDone(std::move(other));
  CycleUntilDone(std::move(own));
  while (Take(1) >= 0) {
  }
  At(0).Collect();
  RunRoundOfRank0();
  EXPECT_EQ(CompletedOf(1, 0), 3);
  EXPECT_EQ(Take(1), -1) << "this rank is still in its flush";
}

// A rank whose end is over may shut Horovod down at once, for all ranks: what the others' last flush has brought is
// theirs.
TEST_F(FamilyTest, WhatTheLastFlushHasBroughtIsTakenAlsoAfterAShutdown) {
  StartFamily();
  RunRoundOfRank0();
  Engine::Flushing flushing(EngineOf(1), Report::Flush::kEnding, {family_});
  auto other = Begin([&] { WaitForEnd(EngineOf(0)); });
  std::vector<int> taken;
  auto own = Begin([&] {
    while (flushing.Wait()) taken.push_back(Take(1));
  });
  CycleUntilDone(std::move(other));
  CycleUntilDone(std::move(own));
  EngineOf(1).Close("shut down");
  for (int gradients = Take(1); gradients >= 0; gradients = Take(1)) taken.push_back(gradients);
  EXPECT_THAT(taken, testing::ElementsAre(2, 0));  // and the flush's own round, in which nothing was pending
}

TEST_F(FamilyTest, AfterAShutdownNothingElseIsTaken) {
  StartFamily();
  RunRoundOfRank0();
  EngineOf(1).Close("shut down");
  EXPECT_THAT([&] { Take(1); }, ThrowsMessage<EngineError>(HasSubstr("shut down")));
}

TEST_F(FamilyTest, ADeliveryLeavesTheMembersTogether) {
  StartFamily();
  ArriveTogether({0});
  At(1).Arrive(0);  // late there, and what it brings is pending
  EXPECT_EQ(CompletedOf(1, 0), 2);
  EXPECT_EQ(CompletedOf(1, 1), 1);
  CycleUntilDone(Begin([&] { EngineOf(1).Deliver({family_}); }));
  EXPECT_FALSE(HasPending(*EngineOf(1).buckets().Find(BucketName(0))));
  EXPECT_EQ(CompletedOf(1, 0), CompletedOf(1, 1));
}

TEST_F(FamilyTest, ClearForgetsWholeRounds) {
  StartFamily();
  RunRoundOfRank0();
  At(0).Wait(0);
  ArriveTogether({0});
  EngineOf(1).families().Clear(family_);
  EXPECT_EQ(Take(1), -1) << "the first round is forgotten, and the second has not ended in all members";
  At(0).Wait(1);
  At(0).Arrive(1);
  CycleUntilDone(Begin([&] { At(0).Wait(1); }));
  EXPECT_EQ(Take(1), 1) << "what this rank had of it is forgotten, and counts as zeros";
  EXPECT_THAT(first_, Each(0));
}

// --- Buckets that end

class EndsTest : public RanksTest {
 protected:
  // Every rank has the same buckets, and an owner of all of them.
  void StartOwned(int size, const std::vector<BucketConfig>& configs, FakeHorovod::Settings settings = {}) {
    const auto buckets = static_cast<int>(configs.size());
    Start(size, configs, std::move(settings));
    for (Rank rank = 0; rank < size; ++rank) {
      owners_.push_back(std::make_shared<Owner>());
      for (int bucket = 0; bucket < buckets; ++bucket) EngineOf(rank).buckets().Own(BucketName(bucket), owners_.back());
    }
    RunRoundZero();
  }
  void Leave(Rank rank) { owners_[static_cast<std::size_t>(rank)]->Leave(); }
  bool Knows(Rank rank, int bucket) { return EngineOf(rank).buckets().Find(BucketName(bucket)) != nullptr; }
  void LeaveAndCycle(Rank rank) {
    Leave(rank);
    Cycle();
  }
  void AllLeave() {
    for (const auto& owner : owners_) owner->Leave();
    Cycle();
  }

  std::vector<std::shared_ptr<Owner>> owners_;
};

TEST_F(EndsTest, ABucketEndsOnAllRanksTogetherWhenAllOwnersAreGone) {
  StartOwned(3, {Config(1), Config(1)});
  for (const Rank rank : {0, 2}) {
    Leave(rank);
    Cycle();
    for (const Rank each : {0, 1, 2}) EXPECT_TRUE(Knows(each, 0)) << "rank " << each;
  }
  EXPECT_EQ(Rounds(), 2u);
  EXPECT_FALSE(EngineOf(0).WantsCycle(Now(), kNever)) << "nothing is new";
  Leave(1);
  EXPECT_TRUE(EngineOf(1).WantsCycle(Now(), kNever));
  Cycle();
  for (const Rank rank : {0, 1, 2})
    for (const int bucket : {0, 1}) EXPECT_FALSE(Knows(rank, bucket)) << "rank " << rank;
  EXPECT_TRUE(LastRound().closing.ends);
  EXPECT_EQ(LastRound().closing.members(0).size(), 0u) << "nothing was pending";
}

TEST_F(EndsTest, WhatIsPendingTravelsInTheLastRound) {
  StartOwned(2, {Config(1)});
  StepWithoutRank1();
  const std::weak_ptr<SharedBucket> memory = At(1).At(0).handle;
  At(1).At(0).handle = nullptr;
  LeaveAndCycle(1);
  EXPECT_TRUE(HasPending(*memory.lock()));
  LeaveAndCycle(0);
  EXPECT_TRUE(LastRound().closing.ends);
  EXPECT_EQ(LastRound().closing.gradients(), 1);
  EXPECT_EQ(memory.lock(), nullptr) << "memory is free";
  EXPECT_FALSE(Knows(0, 0));
}

TEST_F(EndsTest, ARankThatKeepsItsOwnerGoesOnAndTheOthersKeepNoResults) {
  StartOwned(2, {Config(1)});
  Leave(1);
  for (int step = 0; step < 3; ++step) Step(0);
  Cycle();
  const std::shared_ptr<SharedBucket> retired = EngineOf(1).buckets().Find(BucketName(0));
  ASSERT_NE(retired, nullptr);
  EXPECT_EQ(retired->core.missed_rounds(), 0);
  LeaveAndCycle(0);
  EXPECT_FALSE(Knows(1, 0));
}

TEST_F(EndsTest, ALaterOwnerOfTheSameNameIsNotMistakenForTheOneThatLeft) {
  StartOwned(2, {Config(1)});
  AllLeave();
  ASSERT_FALSE(Knows(0, 0));
  const auto owner = std::make_shared<Owner>();
  for (const Rank rank : {0, 1}) EngineOf(rank).buckets().Own(BucketName(0), owner);
  RunRoundZero();
  EXPECT_EQ(LastRound().closing.reason, Closing::Reason::kFirst);
  LeaveAndCycle(0);
  EXPECT_TRUE(Knows(0, 0));
  owner->Leave();
  Cycle();
  EXPECT_FALSE(Knows(0, 0));
}

TEST_F(EndsTest, AnArrivalUnretires) {
  StartOwned(2, {Config(1)});
  LeaveAndCycle(0);
  Step(0);
  LeaveAndCycle(1);
  EXPECT_TRUE(Knows(0, 0)) << "it has an owner no more, and stays";
  EXPECT_TRUE(Knows(1, 0));
}

TEST_F(EndsTest, DeliveringDoesNotUnretire) {
  StartOwned(2, {Config(1)});
  StepWithoutRank1();
  Leave(1);
  CycleUntilDone(Begin([&] { EngineOf(1).Deliver(); }));
  LeaveAndCycle(0);
  EXPECT_FALSE(Knows(1, 0));
}

TEST_F(EndsTest, ABucketWhoseLastRoundFailsEndsToo) {
  StartOwned(2, {Config(1)}, Breaking([](const Closing& closing, Rank rank) { return closing.ends && rank == 1; }));
  StepWithoutRank1();
  AllLeave();
  for (const Rank rank : {0, 1}) {
    ASSERT_FALSE(Knows(rank, 0)) << "rank " << rank;
    WaitForFlush(EngineOf(rank));  // waits for nothing
  }
}

// Something happens at any moment after the coordinator of two ranks has decided.
class CrossingTest : public EndsTest, public testing::WithParamInterface<int> {
 protected:
  void CycleAnd(const std::function<void()>& body) {
    RanksTest::CycleAnd([moment = 0]() mutable { return ++moment == GetParam(); }, body);
  }
};

TEST_P(CrossingTest, AnArrivalIsRoundZeroOfANewBucket) {
  StartOwned(2, {Config(1)});
  for (const Rank rank : {0, 1}) Leave(rank);
  CycleAnd([&] { At(1).Arrive(0); });
  EXPECT_TRUE(LastRound().closing.ends);
  EXPECT_FALSE(Knows(0, 0));
  EXPECT_FALSE(At(1).IsDone(0));
  Cycle();
  EXPECT_FALSE(At(1).IsDone(0)) << "round 0 is full";
  ArriveTogether({0});
  for (const Rank rank : {0, 1}) {
    At(rank).Wait(0);
    EXPECT_EQ(At(rank).At(0).got.back().info.round, 0);
    EXPECT_EQ(At(rank).At(0).got.back().info.fresh, 2);
  }
  EXPECT_EQ(At(0).At(0).got.back().results, At(1).At(0).got.back().results);
}

TEST_P(CrossingTest, AnArrivalBesideALastRoundTravelsOnce) {
  StartOwned(2, {Config(1)});
  StepWithoutRank1();
  for (const Rank rank : {0, 1}) Leave(rank);
  CycleAnd([&] {
    At(0).Arrive(0);
    At(1).Arrive(0, false);
  });
  EXPECT_TRUE(LastRound().closing.ends);
  EXPECT_EQ(LastRound().closing.gradients(), 1);
  Cycle();
  for (const Rank rank : {0, 1}) {
    At(rank).Wait(0);
    EXPECT_EQ(At(rank).At(0).got.back().info.round, 0);
    EXPECT_EQ(At(rank).At(0).got.back().info.gradients, 2);
  }
}

TEST_P(CrossingTest, DeliveringBesideALastRoundBeginsNoNewBucket) {
  StartOwned(2, {Config(1)});
  StepWithoutRank1();
  for (const Rank rank : {0, 1}) Leave(rank);
  std::shared_ptr<Operation> operation;
  CycleAnd([&] { operation = EngineOf(1).BeginDelivery(At(1).At(0).handle); });
  Cycle();
  if (operation != nullptr) {  // else the last round has delivered what was pending
    EXPECT_TRUE(EngineOf(1).Poll(*At(1).At(0).handle, *operation));
    EXPECT_TRUE(operation->error.empty());
  }
  for (const Rank rank : {0, 1}) EXPECT_FALSE(Knows(rank, 0)) << "rank " << rank;
}

INSTANTIATE_TEST_SUITE_P(Moments, CrossingTest, testing::Range(6, 15));

TEST_F(EndsTest, AnArrivalAtABucketThatHasEndedBeginsANewOneAndADeliveryDoesNot) {
  StartOwned(2, {Config(1)});
  AllLeave();
  EXPECT_EQ(EngineOf(1).BeginDelivery(At(1).At(0).handle), nullptr);
  EXPECT_FALSE(Knows(1, 0));
  RunRoundZero();  // with the handles that the applications have kept
  EXPECT_EQ(LastRound().closing.reason, Closing::Reason::kFirst);
  EXPECT_EQ(EngineOf(0).buckets().Find(BucketName(0)), At(0).At(0).handle);
}

TEST_F(EndsTest, JoinedRanksForgetItToo) {
  StartOwned(3, {Config(1)});
  horovod().Join(2);
  AllLeave();
  EXPECT_TRUE(LastRound().closing.ends);
  EXPECT_FALSE(Knows(2, 0));
  JoinTogether({0, 1});
  RunRoundZero();
  EXPECT_EQ(LastRound().closing.reason, Closing::Reason::kFirst);
}

TEST_F(EndsTest, AJoinedRankThatKeepsItsOwnerHasItAsJustDeclared) {
  StartOwned(3, {Config(1)});
  horovod().Join(2);
  Leave(0);
  LeaveAndCycle(1);
  EXPECT_TRUE(LastRound().closing.ends);
  EXPECT_FALSE(Knows(1, 0));
  ASSERT_TRUE(Knows(2, 0));
  EXPECT_FALSE(EngineOf(2).buckets().Find(BucketName(0))->core.declared());
  JoinTogether({0, 1});
  LeaveAndCycle(2);
  EXPECT_FALSE(Knows(2, 0));
}

TEST_F(EndsTest, AFlushThatWaitsIsReleasedWhenTheLastBucketEnds) {
  StartOwned(2, {Config(1)});
  StepWithoutRank1();
  auto flush = BeginFlushes({0});
  while (!EngineOf(0).WantsCycle(Now(), kNever)) std::this_thread::yield();
  Cycle();
  AllLeave();
  CycleUntilDone(std::move(flush));
  EXPECT_TRUE(LastRound().closing.ends);
  WaitForFlush(EngineOf(1));  // both return at once
  WaitForEnd(EngineOf(1));
}

TEST_F(EndsTest, AFlushOfOtherBucketsGoesOn) {
  StartOwned(2, {Config(1), Config(1)});
  const auto stays = std::make_shared<Owner>();
  for (const Rank rank : {0, 1}) EngineOf(rank).buckets().Own(BucketName(1), stays);
  auto flush = BeginFlushes({0});
  while (!EngineOf(0).WantsCycle(Now(), kNever)) std::this_thread::yield();
  AllLeave();
  Cycle();
  EXPECT_FALSE(Knows(0, 0));
  EXPECT_EQ(flush[0].wait_for(0s), std::future_status::timeout);
  CycleUntilDone(BeginFlushes({1}));
  CycleUntilDone(std::move(flush));
  EXPECT_EQ(LastRound().closing.reason, Closing::Reason::kFlush);
}

TEST_F(EndsTest, AModelThatIsKeptGoesWithItsRank) {
  StartOwned(2, {ModelConfig({})});
  AllLeave();
  EXPECT_TRUE(LastRound().closing.ends);
  EXPECT_EQ(LastRound().closing.members(0).size(), 0u);
  EXPECT_FALSE(Knows(0, 0));
}

TEST_F(EndsTest, OwnersOfBucketsThatWereNeverUsedLeaveNothing) {
  StartOwned(2, {Config(1)});
  const auto owner = std::make_shared<Owner>();
  EngineOf(0).buckets().Own("never", owner);
  EXPECT_EQ(owner.use_count(), 2);
  owner->Leave();
  Cycle();
  EXPECT_EQ(owner.use_count(), 1);
}

// --- Clear

TEST_F(RanksTest, ClearForgetsOnThisRankAndAFullRoundFollows) {
  StartAndRunRoundZero(2, {Config(1)});
  StepWithoutRank1();
  for (const Rank rank : {0, 1}) EngineOf(rank).families().Clear({BucketName(0)});
  ArriveTogether({0});
  EXPECT_EQ(Rounds(), 2u) << "a quorum of 1 is not enough now";
  At(1).Arrive(0);
  Cycle();
  EXPECT_EQ(LastRound().closing.reason, Closing::Reason::kEverybody);
  for (const Rank rank : {0, 1}) At(rank).Wait(0);
  Floats expected = Contribution(0, 0, 2);
  AddTo(expected, Contribution(1, 0, 2));
  EXPECT_THAT(At(0).At(0).got.back().results, ElementsAre(expected));
}

// --- Groups of ranks

class GroupsTest : public RanksTest {
 protected:
  void WaitFor(const Members& ranks) {
    for (const Rank rank : ranks) At(rank).Wait(0);
  }
  const Application::Got& LastOf(Rank rank) { return At(rank).At(0).got.back(); }
  // Three ranks have groups of 2 ready ranks. Rank 2 had joined in round 0, and is back.
  void RunRoundZeroWithoutRank2() {
    Start(3, {ReadyConfig(2)});
    horovod().Join(2);
    ArriveTogether({0, 1});
    WaitFor({0, 1});
    JoinTogether({0, 1});
  }
  // Rank 0 waits, and rank 2 has come with another policy.
  std::shared_ptr<Operation> Disagree() {
    ArriveTogether({0});
    const auto handle = EngineOf(2).buckets().Declare(BucketName(0), ReadyConfig(3));
    auto operation = EngineOf(2).Arrive(handle, {model_.data(), model_.data(), 1});
    for (int i = 0; i < 5; ++i) Cycle();
    EXPECT_TRUE(EngineOf(2).Poll(*handle, *operation));
    for (const Rank rank : {0, 1, 2})
      EXPECT_EQ(EngineOf(rank).buckets().Find(BucketName(0)), nullptr) << "the name is free";
    return operation;
  }

  Floats model_ = Floats(kElements);
};

TEST_F(GroupsTest, AnEndedRanksModelIsLeftOut) {
  StartAndRunRoundZero(2, {ModelConfig(Pairs().schedule)});
  auto end = Begin([this] { WaitForEnd(EngineOf(1)); });
  AwaitWaiting(1);
  Step(0);
  EXPECT_THAT(LastOf(0).results, ElementsAre(Contribution(0, 0, 1)));
  EXPECT_EQ(LastOf(0).info.gradients, 1);
  CycleUntilDone(Begin([this] { WaitForEnd(EngineOf(0)); }));
  CycleUntilDone(std::move(end));
}

TEST_F(GroupsTest, AFlushOfModelsIsNoRound) {
  StartAndRunRoundZero(3, {ModelConfig(Pairs().schedule), ReadyConfig(2), Config(1)});
  for (int flush = 0; flush < 2; ++flush) CycleUntilDone(BeginFlushes({0, 1, 2}));
  for (int bucket = 0; bucket < 3; ++bucket) {
    for (const Rank rank : {0, 1, 2}) At(rank).Arrive(bucket);
    Cycle();
    for (const Rank rank : {0, 1, 2}) {
      const bool grouped_by_readiness = bucket == 1 && !At(rank).IsDone(bucket);
      if (grouped_by_readiness) continue;  // one of three is left over
      At(rank).Wait(bucket);
      EXPECT_EQ(At(rank).At(bucket).got.back().info.round, bucket == 2 ? 3 : 1);
      EXPECT_EQ(At(rank).At(bucket).handle->statistics.rounds, bucket == 2 ? 4 : 2);
    }
  }
}

TEST_F(GroupsTest, AnErrorInAGroupIsItsMembers) {
  Start(4, {ReadyConfig(2)},
        Breaking([](const Closing& closing, Rank rank) { return closing.round == 1 && closing.Includes(rank); }));
  RunRoundZero();
  ArriveTogether({0, 1});
  for (const Rank rank : {0, 1}) EXPECT_THAT([&] { At(rank).Wait(0); }, ThrowsMessage<EngineError>(kBroken));
  ArriveTogether({2, 3});
  WaitFor({2, 3});
  EXPECT_EQ(LastOf(2).results, LastOf(3).results);
}

TEST_F(GroupsTest, ARankThatHadJoinedInRoundZeroDoesNotLoseItsModelWhenItSlipsIn) {
  RunRoundZeroWithoutRank2();
  At(2).Declare(0);
  for (const Rank rank : {0, 1}) At(rank).Arrive(0);
  CycleAnd([&] { return Rounds() == 2; }, [&] { At(2).Arrive(0); });
  WaitFor({0, 1});
  for (int i = 0; i < 5 && !At(2).IsDone(0); ++i) {
    if (At(0).At(0).operation == nullptr) At(0).Arrive(0);
    Cycle();
  }
  ASSERT_TRUE(At(2).IsDone(0));
  WaitFor({2});
  EXPECT_FALSE(LastOf(2).info.late);
  EXPECT_THAT(LastOf(2).results[0], testing::Contains(testing::Gt(1)).Times(kElements)) << "not zeros";
}

TEST_F(GroupsTest, ALateDisagreementReachesWhoWaitsByNotice) {
  RunRoundZeroWithoutRank2();
  const auto operation = Disagree();
  const auto message = AllOf(HasSubstr("PartialReduce(2)"), HasSubstr("rank 2 asked for PartialReduce(3)"));
  EXPECT_THAT(operation->error, message);
  ASSERT_TRUE(At(0).IsDone(0));
  EXPECT_THAT([&] { At(0).Wait(0); }, ThrowsMessage<EngineError>(message));
  EXPECT_THROW(WaitForFlush(EngineOf(1)), EngineError) << "it waited in nothing, and has lost what was in the bucket";
  EXPECT_THAT([&] { At(1).Arrive(0); }, ThrowsMessage<EngineError>(message));
  CycleUntilDone(BeginFlushes({0, 1, 2}));
}

// It would arrive without a declaration at a bucket that the coordinator knows no more.
TEST_F(GroupsTest, AJoinedRankHearsOfALateDisagreement) {
  RunRoundZeroWithoutRank2();
  horovod().Join(1);
  Disagree();
  EXPECT_THROW(At(0).Wait(0), EngineError);
  EXPECT_THROW(At(1).Arrive(0), EngineError);
}

TEST_F(GroupsTest, WeightedAveragesCountTheWorkBehindAModel) {
  BucketConfig config = Config(3, Missed::kLatest);
  config.spec.late = Late::kDiscard;
  config.spec.divisor = Divisor::kContributors;
  config.spec.weights = Weights::kContraction;
  config.spec.weight_parameter = 0.5;
  Start(3, {config});
  for (int round = 0; round < 2; ++round) {
    for (const Rank rank : {0, 1, 2})
      At(rank).ArriveWith(0, Floats(kElements, static_cast<float>(rank)), rank == 1, 0, 5 - rank);
    Cycle();
    WaitFor({0, 1, 2});
    for (const Rank rank : {0, 1, 2}) {
      EXPECT_THAT(LastOf(rank).results[0], Each(testing::FloatEq((0 * 4 + 1 * 2 + 2 * 1) / 7.F)));
      EXPECT_THAT(LastOf(rank).info.work, ElementsAre(5, 4, 3));
      EXPECT_TRUE(rank == 1 || At(rank).At(0).input.values() == Floats(kElements, static_cast<float>(rank)))
          << "the application's own is not scaled";
    }
  }
}

// --- One engine, and a transport that does as it is told

class MockTransport : public Collectives {
 public:
  MockTransport() { ON_CALL(*this, Alive).WillByDefault(Return(true)); }
  MOCK_METHOD(void, Place,
              (const std::shared_ptr<SharedBucket>&, const std::string&, const BucketConfig&, const Bucket::Entry&),
              (override));
  MOCK_METHOD(bool, Alive, (), (const, override));
  MOCK_METHOD(void, Interrupt, (), (const, override));
};

class OneEngineTest : public testing::Test {
 protected:
  static constexpr Engine::Thresholds kThresholds{10ms, 100ms, 1000h};

  std::shared_ptr<Operation> Arrive() {
    handle_ = engine_.buckets().Declare("bucket", Config(1));
    return engine_.Arrive(handle_, {values_.data(), values_.data(), 1});
  }
  Report ReportAt(Time now, Time foreign_since = kNever) { return engine_.BuildReport(now, foreign_since, false); }
  // What is reported of the only bucket.
  Report::Item ItemNow() {
    const Report report = ReportAt(Now());
    EXPECT_EQ(report.items.size(), 1u);
    return report.items.at(0);
  }
  // Closes a round with what this engine, which is rank 0 of 2, has announced.
  void CloseRound(bool fresh, int gradients) {
    Closing closing;
    closing.bucket = "bucket";
    closing.round = round_++;
    closing.contributions = {{gradients, fresh}, {1, true}};
    engine_.Begin({closing}, false);
  }
  void RunRound(bool fresh, int gradients) {
    CloseRound(fresh, gradients);
    engine_.Finished(handle_, "");
  }
  // Closes the last round of a flush, in which nothing is pending.
  void CloseFlush(Report::Flush over = Report::Flush::kFlushing) {
    Closing closing;
    closing.bucket = "bucket";
    closing.round = round_++;
    closing.reason = over == Report::Flush::kEnding ? Closing::Reason::kEnd : Closing::Reason::kFlush;
    closing.flushes = true;
    closing.flush_over = over;
    closing.contributions.resize(2);
    engine_.Begin({closing}, false);
  }
  void RunFlush(Report::Flush over = Report::Flush::kFlushing) {
    CloseFlush(over);
    engine_.Finished(handle_, "");
  }
  void Refuse(const std::string& bucket, Report::Flush over = Report::Flush::kNone) {
    Closing closing;
    closing.bucket = bucket;
    closing.error = "the ranks do not agree";
    closing.flush_over = over;
    engine_.Begin({closing}, false);
  }
  // Until a thread has begun one, and that has been reported.
  void AwaitFlush() {
    while (ReportAt(Now() + 1h).flush == Report::Flush::kNone) std::this_thread::yield();
  }
  void RunRoundZero() {
    Arrive();
    ReportAt(Now());
    RunRound(true, 1);
  }

  const Watchdog watchdog_{testing::UnitTest::GetInstance()->current_test_info()->name()};
  testing::NiceMock<MockTransport> transport_;
  FakeDevices devices_{1, FakeDevices::Streams::kNone};  // before the buckets that may lie there
  const std::shared_ptr<PossibleArrivals> arrivals_ = std::make_shared<PossibleArrivals>();
  Engine engine_{transport_, 0, 2, kThresholds, arrivals_};
  std::shared_ptr<SharedBucket> handle_;
  Floats values_ = Floats(kElements);
  Round round_ = 0;
};

TEST_F(OneEngineTest, PlacesWhatTheApplicationHasWhenItsRoundBegins) {
  EXPECT_CALL(transport_, Place).Times(0);
  Arrive();
  EXPECT_TRUE(engine_.WantsCycle(Now(), kNever));
  ReportAt(Now());
  testing::Mock::VerifyAndClearExpectations(&transport_);
  EXPECT_CALL(transport_, Place(_, _, _,
                                AllOf(testing::Field(&Bucket::Entry::input, values_.data()),
                                      testing::Field(&Bucket::Entry::output, values_.data()))));
  CloseRound(true, 1);
}

TEST_F(OneEngineTest, AnExceptionWhileArrivingFailsTheBucket) {
  Tensor values(devices_[0]);
  BucketConfig config = Config(1);
  config.memory = &devices_[0];
  handle_ = engine_.buckets().Declare("bucket", config);
  const auto arrive = [&] { return engine_.Arrive(handle_, {values.data(), values.data(), 1}); };
  arrive();
  ReportAt(Now());
  RunRound(true, 1);
  RunRound(false, 0);
  devices_[0].Allow(0);
  EXPECT_THAT([&] { arrive(); }, ThrowsMessage<std::runtime_error>(HasSubstr("rank 0 could not keep what belongs")))
      << "a late contribution needs a buffer";
  EXPECT_EQ(handle_->operation, nullptr) << "no later wait, flush or end of the job may wait for it";
  EXPECT_THAT([&] { arrive(); }, ThrowsMessage<EngineError>(HasSubstr("rank 0 could not keep what belongs to bucket")));
  EXPECT_THAT([&] { engine_.Collect(handle_, values.data()); }, ThrowsMessage<EngineError>(HasSubstr("bad_alloc")));
  EXPECT_TRUE(ReportAt(Now()).empty());
}

// A rank whose device computes what a test says, when the test says so.
class SharingOnADeviceTest : public OneEngineTest {
 protected:
  static constexpr int kEach = 4;

  class FakeEvent final : public ReadyEvent {
   public:
    bool Ready() const override { return has_come; }
    std::atomic<bool> has_come{false};
  };

  // The first update, in which each rank makes its own.
  void SetUp() override {
    handle_ = engine_.buckets().Declare(kKeeper, SharedConfig(2, kEach, true));
    for (int i = 0; i < kEach; ++i) {
      ASSERT_TRUE(Begin());
      engine_.Arrive(handle_, {values_.data(), values_.data(), 1});
    }
    ReportAt(Now());
    Closing closing;
    closing.bucket = kKeeper;
    closing.contributions = {{kEach, true}, {kEach, true}};
    engine_.Begin({closing}, false);
    engine_.Finished(handle_, "");
    ASSERT_TRUE(engine_.families().TakeRound({kKeeper}, {values_.data()}));
  }
  // Whether the host may begin a micro-batch now; it does then.
  bool Begin() {
    return engine_.sharing().Next({kKeeper}, true, [] { return true; }).has_value();
  }
  std::shared_ptr<FakeEvent> Queue() {
    auto event = std::make_shared<FakeEvent>();
    engine_.Arrive(handle_, {values_.data(), values_.data(), 1}, event);
    return event;
  }
  void Come(FakeEvent& event) {
    event.has_come = true;
    engine_.WantsCycle(Now(), kNever);
  }

  static constexpr const char* kKeeper = "keeper";
};

TEST_F(SharingOnADeviceTest, AMicroBatchEndsByItsEventAndNotWhenItIsQueued) {
  const Time start = Now();
  ASSERT_TRUE(Begin());
  const auto event = Queue();
  std::this_thread::sleep_for(10ms);
  Report::Item item = ItemNow();
  EXPECT_EQ(item.share->begun, 1);
  EXPECT_EQ(item.share->computed, 0ms);
  EXPECT_GE(item.share->age, 10ms);
  EXPECT_NE(item.kind, Report::Item::Kind::kArrival);
  Come(*event);
  item = ItemNow();
  EXPECT_EQ(item.kind, Report::Item::Kind::kArrival);
  EXPECT_EQ(item.gradients, 1);
  EXPECT_GE(item.share->computed, 10ms);
  EXPECT_LE(item.share->computed + item.share->age, Now() - start);
}

TEST_F(SharingOnADeviceTest, OneWaitsBehindTheOneInProgressButNotBehindTheFirst) {
  ASSERT_TRUE(Begin());
  const auto first = Queue();
  EXPECT_FALSE(Begin()) << "the coordinator may still take it back";
  Come(*first);
  ASSERT_TRUE(Begin());
  const auto second = Queue();
  ASSERT_TRUE(Begin());
  const auto third = Queue();
  EXPECT_FALSE(Begin()) << "another rank's device may be free before this one has begun it";
  EXPECT_EQ(ItemNow().share->begun, 3);
  Come(*second);
  EXPECT_EQ(ItemNow().gradients, 2);
  EXPECT_TRUE(Begin());
  Come(*third);
  EXPECT_EQ(ItemNow().gradients, 3);
}

TEST_F(SharingOnADeviceTest, WhatIsQueuedIsNeitherReturnedNorGivenUp) {
  const auto owner = std::make_shared<Owner>();
  engine_.buckets().Own(kKeeper, owner);
  ASSERT_TRUE(Begin());
  Come(*Queue());
  ASSERT_TRUE(Begin());
  const auto second = Queue();
  engine_.sharing().Return(kKeeper);
  EXPECT_EQ(ItemNow().share->begun, 2);
  ASSERT_TRUE(Begin());
  owner->Leave();
  EXPECT_EQ(ItemNow().share->begun, 2) << "the device will make the second, and nobody the third";
  Come(*second);
  EXPECT_EQ(ItemNow().gradients, 2);
}

TEST_F(SharingOnADeviceTest, AFlushIsNoWaitWhileTheDeviceComputes) {
  ASSERT_TRUE(Begin());
  Come(*Queue());
  ASSERT_TRUE(Begin());
  const auto second = Queue();
  auto background = std::async(std::launch::async, [&] {
    while (arrivals_->LongestWait().since == kNever) std::this_thread::yield();
    const Report report = ReportAt(Now() + 1h);
    EXPECT_FALSE(report.waiting.Has(kKeeper)) << "the round would close without what the device still computes";
    EXPECT_FALSE(report.blocked);
    Come(*second);
    while (!ReportAt(Now() + 1h).waiting.Has(kKeeper)) std::this_thread::yield();
    Refuse(kKeeper);
  });
  EXPECT_THROW(WaitForFlush(engine_), EngineError);
  background.get();
}

TEST_F(OneEngineTest, NothingIsAcceptedAfterAShutdown) {
  EXPECT_CALL(transport_, Alive).WillRepeatedly(Return(false));
  EXPECT_THAT([&] { Arrive(); }, ThrowsMessage<EngineError>(HasSubstr("shut down")));
  EXPECT_TRUE(ReportAt(Now()).empty());
}

TEST_F(OneEngineTest, AWaitIsReportedBeyondItsThreshold) {
  const Time before = Now();
  auto waiting = std::async(std::launch::async, [&] {
    const auto operation = Arrive();
    engine_.Wait(*handle_, *operation);
  });
  while (ReportAt(before).items.empty()) std::this_thread::yield();
  ReportAt(before);  // the arrival may have called for it while it was being reported
  while (!engine_.WantsCycle(Now() + 1h, kNever)) std::this_thread::yield();
  const Time after = Now();
  EXPECT_FALSE(engine_.WantsCycle(before + 10ms, kNever));
  EXPECT_FALSE(ReportAt(before + 10ms).waiting.all);
  EXPECT_TRUE(engine_.WantsCycle(after + 10ms + 1ns, kNever));
  EXPECT_TRUE(ReportAt(after + 10ms + 1ns).waiting.all);
  EXPECT_FALSE(engine_.WantsCycle(after + 1h, kNever)) << "it has been reported";
  RunRound(true, 1);
  EXPECT_TRUE(engine_.WantsCycle(Now() + 1h, kNever))
      << "it is no longer true, though the thread may not have woken up";
  EXPECT_FALSE(ReportAt(Now() + 1h).waiting.all);
  waiting.get();
}

TEST_F(OneEngineTest, TwoThreadsMayWaitForOneArrival) {
  const auto operation = Arrive();
  ReportAt(Now());
  Script script(1);
  for (int i = 0; i < 2; ++i) {
    script.Spawn([&] { script.Block([&] { engine_.Wait(*handle_, *operation); }); });
    script.TakeTurn();
  }
  RunRound(true, 1);
  script.Settle();
  while (script.TakeTurn()) continue;
  EXPECT_TRUE(script.Done());
  EXPECT_FALSE(ReportAt(Now() + 1h).waiting.all);
}

TEST_F(OneEngineTest, AFlushIsReportedAsAWaitToo) {
  std::atomic<bool> alive{true};
  EXPECT_CALL(transport_, Alive).WillRepeatedly([&] { return alive.load(); });
  std::promise<void> used;
  auto flushing = std::async(std::launch::async, [&] {
    RunRoundZero();
    used.set_value();
    EXPECT_THROW(WaitForFlush(engine_), EngineError);
  });
  used.get_future().wait();
  Report report;
  while (!report.absent.all) report = ReportAt(Now() + 1h);
  EXPECT_EQ(report.flush, Report::Flush::kFlushing);
  EXPECT_TRUE(report.waiting.all);
  alive = false;
  flushing.get();
  EXPECT_TRUE(engine_.WantsCycle(Now(), kNever));
  EXPECT_TRUE(ReportAt(Now() + 1h).empty()) << "the others must not count on a rank that has given up";
}

// The closing of the flush that was given up is on its way, or its rounds run, when the next one begins.
TEST_F(OneEngineTest, AFlushThatFollowsOneThatWasGivenUpIsAFlushOfItsOwn) {
  for (const bool closed : {true, false}) {
    if (closed) RunRoundZero();
    std::atomic<bool> interrupted{false};
    EXPECT_CALL(transport_, Interrupt).WillRepeatedly([&] {
      if (!interrupted.exchange(true)) throw std::runtime_error("Ctrl-C");
    });
    auto first = std::async(std::launch::async, [&] { EXPECT_THROW(WaitForFlush(engine_), std::runtime_error); });
    AwaitFlush();
    if (closed) CloseFlush();
    first.get();
    ReportAt(Now() - 1h);  // what was news is none any more
    auto second = std::async(std::launch::async, [&] { WaitForFlush(engine_); });
    while (!engine_.WantsCycle(Now(), kNever)) std::this_thread::yield();
    if (!closed) CloseFlush();
    engine_.Finished(handle_, "");
    EXPECT_EQ(ReportAt(Now()).flush, Report::Flush::kFlushing) << "the old rounds are not those of this flush";
    EXPECT_EQ(second.wait_for(200ms), std::future_status::timeout);
    RunFlush();
    second.get();
  }
}

TEST_F(OneEngineTest, AFlushWhoseRoundsRunIsUnderWay) {
  RunRoundZero();
  auto first = std::async(std::launch::async, [&] { WaitForFlush(engine_); });
  AwaitFlush();
  CloseFlush();
  EXPECT_THROW(WaitForFlush(engine_), std::invalid_argument);
  engine_.Finished(handle_, "");
  first.get();
}

TEST_F(OneEngineTest, AFlushWhoseRoundsRunIsNoWait) {
  std::promise<void> used;
  auto flush = std::async(std::launch::async, [&] {
    RunRoundZero();
    used.set_value();
    WaitForFlush(engine_);
  });
  used.get_future().wait();
  AwaitFlush();
  CloseFlush();
  const Report report = ReportAt(Now() + 1h);
  EXPECT_EQ(report.flush, Report::Flush::kNone);
  EXPECT_TRUE(report.absent.empty());
  EXPECT_TRUE(report.waiting.empty());
  engine_.Finished(handle_, "");
  flush.get();
}

// The coordinator begins a flush anew whose last round it has refused; an error does not travel with a flush's end.
TEST_F(OneEngineTest, ARefusedRoundEndsNoFlush) {
  RunRoundZero();
  engine_.buckets().Declare("other", Config(1));
  auto flush = std::async(std::launch::async, [&] { WaitForFlush(engine_); });
  AwaitFlush();
  Refuse("other", Report::Flush::kFlushing);
  EXPECT_EQ(flush.wait_for(200ms), std::future_status::timeout);
  EXPECT_EQ(ReportAt(Now()).flush, Report::Flush::kFlushing);
  RunFlush();
  flush.get();
}

TEST_F(OneEngineTest, AFlushFailsWithABucketThatIsRefused) {
  RunRoundZero();
  auto flush = std::async(std::launch::async, [&] { WaitForFlush(engine_); });
  AwaitFlush();
  Refuse("bucket");
  EXPECT_THAT([&] { flush.get(); }, ThrowsMessage<EngineError>(HasSubstr("the ranks do not agree")));
  EXPECT_NO_THROW(WaitForFlush(engine_)) << "no bucket is in use any more";
}

TEST_F(OneEngineTest, WhoWaitsInNothingIsToldOnceWhatIsLostWithARefusedBucket) {
  RunRoundZero();
  Refuse("bucket");
  EXPECT_THAT([&] { WaitForFlush(engine_); }, ThrowsMessage<EngineError>(HasSubstr("the ranks do not agree")));
  EXPECT_NO_THROW(WaitForFlush(engine_));
}

TEST_F(OneEngineTest, AnInterruptEndsAFlush) {
  RunRoundZero();
  EXPECT_CALL(transport_, Interrupt).WillOnce([] { throw std::runtime_error("Ctrl-C"); });
  EXPECT_THAT([&] { WaitForFlush(engine_); }, ThrowsMessage<std::runtime_error>("Ctrl-C"));
  EXPECT_TRUE(ReportAt(Now() + 1h).empty());
}

TEST_F(OneEngineTest, AShutdownWhenEveryRankHasEndedIsNoError) {
  RunRoundZero();
  EXPECT_CALL(transport_, Interrupt).WillOnce([&] {  // this thread wakes only when another rank has shut down
    ReportAt(Now());
    RunFlush(Report::Flush::kEnding);
    engine_.Close("Horovod has been shut down");
  });
  EXPECT_NO_THROW(WaitForEnd(engine_));
}

TEST_F(OneEngineTest, ADeadlockOfAllProcessSetsEndsItsWaits) {
  const auto heard = std::make_shared<FirstFailure>();
  Engine other(transport_, 0, 2, kThresholds, arrivals_, heard);
  Engine everybody(transport_, 0, 2, kThresholds, arrivals_, heard);
  const auto bucket = other.buckets().Declare("bucket", Config(1));
  auto waiting = std::async(std::launch::async, [&] {
    const auto operation = other.Arrive(bucket, {values_.data(), values_.data(), 1});
    other.Wait(*bucket, *operation);
  });
  std::string elsewhere;
  while (elsewhere.empty()) elsewhere = everybody.BuildReport(Now(), kNever, false).elsewhere;
  EXPECT_EQ(elsewhere, "in round 0 of bucket");
  EXPECT_EQ(other.BuildReport(Now(), kNever, false).elsewhere, "") << "its own coordinator knows";
  Closing closing;
  closing.bucket = FirstFailure::kDeadlock;
  closing.error = "Ranks wait for each other";
  everybody.Begin({closing}, false);
  EXPECT_FALSE(everybody.WantsCycle(Now(), kNever));
  other.WantsCycle(Now(), kNever);
  EXPECT_THAT([&] { waiting.get(); }, ThrowsMessage<EngineError>("Ranks wait for each other"));
}

TEST_F(OneEngineTest, AWaitForAForeignCollectiveIsReportedBeyondItsThreshold) {
  RunRoundZero();
  const Time since = Now();
  EXPECT_FALSE(ReportAt(since + 100ms + 1ns, since).absent.all) << "it is asynchronous";
  const PossibleArrivals::ForeignWait wait(arrivals_, since);
  EXPECT_FALSE(ReportAt(since + 100ms, since).absent.all);
  EXPECT_TRUE(ReportAt(since + 100ms + 1ns, since).absent.all);
}

TEST_F(OneEngineTest, AnInterruptEndsAWait) {
  const auto operation = Arrive();
  EXPECT_CALL(transport_, Interrupt).WillOnce(Return()).WillOnce([] { throw std::runtime_error("Ctrl-C"); });
  EXPECT_THAT([&] { engine_.Wait(*handle_, *operation); }, ThrowsMessage<std::runtime_error>("Ctrl-C"));
  EXPECT_FALSE(ReportAt(Now() + 1h).waiting.all);
}

TEST_F(OneEngineTest, AnInterruptEndsACollectionAndLosesNothing) {
  RunRoundZero();
  RunRound(false, 0);
  CloseRound(false, 0);
  EXPECT_CALL(transport_, Interrupt).WillOnce([] { throw std::runtime_error("Ctrl-C"); });
  EXPECT_THAT([&] { engine_.Collect(handle_, values_.data()); }, ThrowsMessage<std::runtime_error>("Ctrl-C"));
  EXPECT_EQ(handle_->operation, nullptr) << "the caller's memory may be gone";
  engine_.Finished(handle_, "");
  EXPECT_EQ(handle_->core.missed_rounds(), 2);
  EXPECT_NE(engine_.Collect(handle_, values_.data()), nullptr);
}

TEST_F(OneEngineTest, AnArrivalIsReportedWithItsDeclarationUntilARoundHasClosed) {
  Arrive();
  const auto declaration = ItemNow().declaration;
  ASSERT_TRUE(declaration);
  EXPECT_EQ(declaration->policy.description, "Quorum(1)");
  EXPECT_EQ(declaration->type, DataType::kFloat32);
  EXPECT_THAT(declaration->shape, ElementsAre(kElements));
  EXPECT_EQ(declaration->device, Memory::kHost);
  RunRound(true, 1);
  Arrive();
  EXPECT_FALSE(ItemNow().declaration);
}

TEST_F(OneEngineTest, ALateContributionWantsACycleAndIsReportedInEach) {
  RunRoundZero();
  ReportAt(Now());
  RunRound(false, 0);
  EXPECT_FALSE(engine_.WantsCycle(Now(), kNever));
  EXPECT_TRUE(Arrive()->done);
  EXPECT_TRUE(engine_.WantsCycle(Now(), kNever));
  for (int i = 0; i < 2; ++i) {
    const Report::Item item = ItemNow();
    EXPECT_EQ(item.kind, Report::Item::Kind::kPending);
    EXPECT_EQ(item.gradients, 1);
    EXPECT_FALSE(engine_.WantsCycle(Now(), kNever)) << "once is enough, if nothing else happens";
  }
}

TEST_F(OneEngineTest, ARoundThatRunsIsReportedAndWhatCameMeanwhileWantsACycle) {
  RunRoundZero();
  ReportAt(Now());
  CloseRound(false, 0);
  Arrive();
  EXPECT_EQ(ItemNow().kind, Report::Item::Kind::kRunning);
  EXPECT_FALSE(engine_.WantsCycle(Now(), kNever));
  engine_.Finished(handle_, "");
  EXPECT_TRUE(engine_.WantsCycle(Now(), kNever)) << "to announce what is pending";
}

// A caller that does not wait, and is told.
class ToldTest : public OneEngineTest {
 protected:
  std::shared_ptr<Operation> ArriveAndBeTold() {
    handle_ = engine_.buckets().Declare("bucket", Config(1));
    return engine_.Arrive(handle_, {values_.data(), values_.data(), 1}, nullptr, [this](const Operation& operation) {
      ++told_;
      EXPECT_TRUE(operation.done);
      error_ = operation.error;
      round_told_ = operation.info.round;
      const std::unique_lock<std::mutex> lock(handle_->mutex, std::try_to_lock);
      EXPECT_TRUE(lock.owns_lock()) << "a lock is held";
    });
  }
  void CloseRoundOnTime() {
    ReportAt(Now());
    RunRound(true, 1);
  }

  int told_ = 0;
  std::string error_;
  Round round_told_ = -1;
};

TEST_F(ToldTest, WhenItsRoundIsOver) {
  ArriveAndBeTold();
  EXPECT_EQ(told_, 0);
  CloseRoundOnTime();
  EXPECT_EQ(told_, 1);
  EXPECT_EQ(round_told_, 0);
  ArriveAndBeTold();
  CloseRoundOnTime();
  EXPECT_EQ(told_, 2);
  EXPECT_EQ(round_told_, 1);
}

TEST_F(ToldTest, AtOnceWhereItIsLate) {
  ArriveAndBeTold();
  CloseRoundOnTime();
  RunRound(false, 0);
  const auto operation = ArriveAndBeTold();
  EXPECT_EQ(told_, 2);
  EXPECT_TRUE(operation->info.late);
}

TEST_F(ToldTest, OfAFailedRound) {
  ArriveAndBeTold();
  ReportAt(Now());
  CloseRound(true, 1);
  engine_.Finished(handle_, "the link is down");
  EXPECT_EQ(told_, 1);
  EXPECT_EQ(error_, "the link is down");
}

TEST_F(ToldTest, OfAShutdown) {
  ArriveAndBeTold();
  engine_.Close("the end");
  engine_.Close("again");
  EXPECT_EQ(told_, 1);
  EXPECT_EQ(error_, "the end");
}

TEST_F(ToldTest, NotWhereTheArrivalIsRefused) {
  engine_.Close("the end");
  EXPECT_THROW(ArriveAndBeTold(), EngineError);
  EXPECT_EQ(told_, 0);
}

class ReadyGroupsTest : public OneEngineTest {
 protected:
  // Round 0 is over; returns the arrival after that.
  std::shared_ptr<Operation> ArriveAfterRoundZero() {
    handle_ = engine_.buckets().Declare("bucket", ReadyConfig(2));
    engine_.Arrive(handle_, {values_.data(), values_.data(), 1});
    ReportAt(Now());
    RunRound(true, 1);
    ReportAt(Now());
    return engine_.Arrive(handle_, {values_.data(), values_.data(), 1});
  }
  // A group of these ranks.
  void CloseGroup(const Partition& groups) {
    Closing closing;
    closing.bucket = "bucket";
    closing.round = round_++;
    closing.reason = Closing::Reason::kQuorum;
    for (const int group : groups) closing.contributions.push_back({group == kNoGroup ? 0 : 1, group != kNoGroup});
    closing.groups = groups;
    engine_.Begin({closing}, false);
  }
};

TEST_F(ReadyGroupsTest, AnArrivalIsReportedOnce) {
  const auto operation = ArriveAfterRoundZero();
  EXPECT_TRUE(engine_.WantsCycle(Now(), kNever));
  const Report::Item item = ItemNow();
  EXPECT_EQ(item.kind, Report::Item::Kind::kArrival);
  EXPECT_FALSE(item.declaration);
  EXPECT_FALSE(engine_.WantsCycle(Now(), kNever));
  EXPECT_TRUE(ReportAt(Now()).items.empty()) << "an arrival is an event";
}

TEST_F(ReadyGroupsTest, WhoIsNoMemberGetsAnEntryWithoutData) {
  const auto operation = ArriveAfterRoundZero();
  ReportAt(Now());
  EXPECT_CALL(transport_, Place(_, _, _,
                                AllOf(testing::Field(&Bucket::Entry::member, false),
                                      testing::Field(&Bucket::Entry::input, testing::IsNull()))));
  CloseGroup({kNoGroup, 0});
  EXPECT_FALSE(operation->done);
  testing::Mock::VerifyAndClearExpectations(&transport_);
  EXPECT_CALL(transport_, Place(_, _, _,
                                AllOf(testing::Field(&Bucket::Entry::member, true),
                                      testing::Field(&Bucket::Entry::input, values_.data()),
                                      testing::Field(&Bucket::Entry::output, values_.data()))));
  CloseGroup({0, kNoGroup});
  engine_.Finished(handle_, "");
  EXPECT_TRUE(operation->done);
  EXPECT_EQ(operation->info.round, 2);
}

TEST_F(ReadyGroupsTest, AWaitEndsSoonAfterAShutdown) {
  const auto operation = ArriveAfterRoundZero();
  int looks = 0;
  EXPECT_CALL(transport_, Alive).WillRepeatedly([&] {
    ++looks;
    return false;
  });
  EXPECT_THAT([&] { engine_.Wait(*handle_, *operation); }, ThrowsMessage<EngineError>(HasSubstr("shut down")));
  EXPECT_LE(looks, 3) << "there is no entry that somebody would call back";
}

TEST_F(OneEngineTest, AFlushOfAnEngineWithoutARoundReturnsAtOnce) {
  WaitForFlush(engine_);
  WaitForEnd(engine_);
}

}  // namespace
}  // namespace horovod_partial::test
