// Who gets which micro-batches. That no order of events breaks an update, test_exhaustive_sharing.cc explores.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <vector>

#include "core/rounds/work_sharing.h"
#include "simulator/shared_job.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
using testing::DoubleNear;
using testing::ElementsAre;
using testing::IsEmpty;

TEST(OwnShareTest, BeginsWithItsOwn) {
  OwnShare share(2, 3);
  for (const int expected : {6, 7, 8}) {
    ASSERT_TRUE(share.MayBegin());
    EXPECT_EQ(share.next(), expected);
    share.Begin(0ms);
  }
  EXPECT_FALSE(share.MayBegin());
  share.Advance();
  EXPECT_EQ(share.next(), 6);
  EXPECT_EQ(share.share(0ms), (Share{3, 0})) << "all of its own in the next update";
}

TEST(OwnShareTest, KeepsWhatHasBegun) {
  OwnShare share(0, 2);
  share.Begin(0ms);
  share.Begin(0ms);
  share.Hear({0});
  EXPECT_EQ(share.share(0ms), (Share{2, 2})) << "the second had begun when it was taken back";
  share.Return();
  EXPECT_EQ(share.next(), 1);
  share.Leave();
  EXPECT_FALSE(share.MayBegin());
}

TEST(OwnShareTest, WhatWaitsOnADeviceBeginsWhenTheOneBeforeHasEnded) {
  OwnShare share(0, 3);
  share.Begin(0ms);
  share.Begin(1ms);
  share.End(10ms);
  EXPECT_EQ(share.share(12ms), (Share{3, 2, 10ms, 2ms}));
  share.End(20ms);
  EXPECT_EQ(share.share(22ms), (Share{3, 2, 20ms, 2ms}));
  share.Begin(25ms);
  EXPECT_EQ(share.share(26ms), (Share{3, 3, 20ms, 1ms})) << "the device was idle";
}

class LedgerTest : public testing::Test {
 protected:
  static constexpr int kRanks = 3;

  std::vector<MicroBatches> Decide() { return ledger_.Decide(std::vector<bool>(kRanks, true), now_); }
  // What a rank would report that has begun its next micro-batch `age` ago, or has ended its last then and waits.
  void Say(Rank rank, int granted, int begun, int done, Time age = 0ms) {
    const bool wants = granted == done && granted > 0;
    ledger_.Observe(rank, {granted, begun, done * paces_[static_cast<std::size_t>(rank)], age, wants}, done, now_);
  }
  // An update in which each rank makes its own two.
  void Learn(std::vector<Time> paces) {
    paces_ = std::move(paces);
    for (Rank rank = 0; rank < kRanks; ++rank) Say(rank, 2, 2, 2);
    ledger_.Advance();
  }
  // A rank has come back from a flush, holds nothing and waits.
  void Wait(Rank rank) { ledger_.Observe(rank, {0, 0, 0ms, 0ms, true}, 0, now_); }
  // A micro-batch takes 10 ms. After `time` ranks 0 and 1 have made theirs, and rank 2 is in its first one.
  void Delay(Time time) {
    Learn({10ms, 10ms, 10ms});
    now_ += time;
    for (Rank rank : {0, 1}) Say(rank, 2, 2, 2, time - 20ms);
    Say(2, 2, 1, 0, time);
  }

  Ledger ledger_{kRanks, 6};
  std::vector<Time> paces_{0ms, 0ms, 0ms};
  Time now_{1h};
};

TEST_F(LedgerTest, EveryRankHoldsItsWholeShare) {
  Learn({10ms, 10ms, 10ms});
  EXPECT_THAT(Decide(), IsEmpty());
  for (Rank rank = 0; rank < kRanks; ++rank) Say(rank, 2, 1, 0);
  EXPECT_THAT(Decide(), IsEmpty());
  now_ += 10ms;
  for (Rank rank = 0; rank < kRanks; ++rank) Say(rank, 2, 2, 1);
  EXPECT_THAT(Decide(), IsEmpty()) << "nothing moves where no rank is slow";
  EXPECT_EQ(ledger_.NextDeadline(), kNever);
}

TEST_F(LedgerTest, ASlowRankKeepsWhatItEndsInTime) {
  Learn({10ms, 10ms, 100ms});
  EXPECT_THAT(Decide(), ElementsAre(MicroBatches{0, 1}, MicroBatches{2, 3}, MicroBatches{4}))
      << "its second is taken back before it begins, and its first shows how fast it is now";
  for (Rank rank : {0, 1}) Say(rank, 2, 1, 0);
  Say(2, 1, 1, 0);
  EXPECT_THAT(Decide(), ElementsAre(MicroBatches{0, 1, 5}, MicroBatches{2, 3}, MicroBatches{4}))
      << "rank 0 holds one more before it has ended its own";
  EXPECT_THAT(Decide(), IsEmpty()) << "that is told once";
}

TEST_F(LedgerTest, ARankThatIsFastAgainKeepsItsShareInTheNextUpdate) {
  Learn({10ms, 10ms, 100ms});
  paces_[2] = 10ms;
  for (int update = 0; update < 8; ++update) {
    for (Rank rank = 0; rank < kRanks; ++rank) Say(rank, 2, 2, 2);
    ledger_.Advance();
  }
  EXPECT_THAT(Decide(), IsEmpty());
}

TEST_F(LedgerTest, WhoDoesNotBeginItsFirstLosesIt) {
  Learn({10ms, 10ms, 10ms});
  for (Rank rank : {0, 1}) Say(rank, 2, 1, 0);
  Say(2, 2, 0, 0);
  EXPECT_THAT(Decide(), IsEmpty());
  now_ += 20ms;
  for (Rank rank : {0, 1}) Say(rank, 2, 2, 2);
  Say(2, 2, 0, 0);
  EXPECT_THAT(Decide(), ElementsAre(MicroBatches{0, 1}, MicroBatches{2, 3}, MicroBatches{}));
}

TEST_F(LedgerTest, WhoIsAwayDoesNotGetItsMicroBatchesAgain) {
  Learn({10ms, 10ms, 10ms});
  now_ += 1s;
  for (Rank rank : {0, 1}) Say(rank, 2, 2, 2, 980ms);
  Say(2, 2, 0, 0);
  EXPECT_THAT(Decide(), ElementsAre(MicroBatches{0, 1}, MicroBatches{2, 3}, MicroBatches{}));
  Say(2, 0, 0, 0);
  EXPECT_THAT(Decide(), ElementsAre(MicroBatches{0, 1, 5}, MicroBatches{2, 3, 4}, MicroBatches{}));
}

TEST_F(LedgerTest, WhoComesBackLateFromAFlushGetsOne) {
  for (const bool was_away : {true, false}) {
    Learn({10ms, 10ms, 100ms});
    Wait(2);
    const auto moved = ledger_.Decide({true, true, !was_away}, now_);
    EXPECT_THAT(moved, ElementsAre(MicroBatches{0, 1, 5}, MicroBatches{2, 3, 4}, MicroBatches{}));
    for (const int held : {3, 2}) {  // ranks 0 and 1 begin none until rank 2 may begin one
      Decide();
      for (Rank rank : {0, 1}) Say(rank, held, 0, 0);
      Wait(2);
    }
    const auto granted = Decide();
    EXPECT_EQ(granted.empty() ? 0u : granted[2].size(), was_away ? 1u : 0u) << "though that does not pay";
  }
}

TEST_F(LedgerTest, AllWhoComeBackLateFromAFlushGetOne) {
  Learn({10ms, 100ms, 100ms});
  Say(0, 2, 1, 0);
  ledger_.Decide({true, false, false}, now_);
  for (Rank rank : {1, 2}) Wait(rank);
  Decide();
  Say(0, 2, 1, 0);
  for (Rank rank : {1, 2}) Wait(rank);
  const auto granted = Decide();
  ASSERT_EQ(granted.size(), 3u);
  EXPECT_THAT(granted[1], ElementsAre(2));
  EXPECT_THAT(granted[2], ElementsAre(4));
}

TEST_F(LedgerTest, OnePauseMakesNoRankSlow) {
  Learn({10ms, 10ms, 10s});
  Learn({10ms, 10ms, 10ms});
  Learn({10ms, 10ms, 10ms});
  EXPECT_THAT(Decide(), IsEmpty());
}

TEST_F(LedgerTest, AReductionMakesNobodyLate) {
  Learn({10ms, 10ms, 10ms});
  now_ += 1s;  // meanwhile the ranks take the result of the update before
  for (Rank rank : {0, 1}) Say(rank, 2, 1, 0);
  Say(2, 2, 0, 0);
  EXPECT_THAT(Decide(), IsEmpty());
}

TEST_F(LedgerTest, ABeginMayBeReportedLate) {
  Learn({10ms, 10ms, 10ms});
  now_ += 20ms;
  for (Rank rank : {0, 1}) Say(rank, 2, 2, 2);
  Say(2, 2, 0, 0);
  EXPECT_THAT(Decide(), ElementsAre(MicroBatches{0, 1}, MicroBatches{2, 3}, MicroBatches{}))
      << "the others have begun 20 ms ago";
}

TEST(LedgerOfTwoTest, WhatWaitsOnADeviceTakesItsTime) {
  Ledger ledger(2, 6);
  const Time now = 1h;
  const Share slow{3, 3, 75ms, 0ms, true};
  ledger.Observe(0, slow, 3, now);
  ledger.Observe(1, {3, 3, 30ms}, 3, now);
  ledger.Advance();
  ledger.Observe(0, slow, 3, now);
  ledger.Observe(1, {3, 2, 0ms}, 0, now);
  EXPECT_THAT(ledger.Decide({true, true}, now), ElementsAre(MicroBatches{0, 1, 2}, MicroBatches{3, 4}))
      << "rank 1 would end its third in 30 ms, and rank 0 ends it in 25 ms";
}

TEST_F(LedgerTest, WhatIsTakenBackIsFreeWhenTheRankHasConfirmed) {
  Delay(20ms);
  EXPECT_THAT(Decide(), ElementsAre(MicroBatches{0, 1}, MicroBatches{2, 3}, MicroBatches{4}));
  Say(2, 1, 1, 0, 20ms);
  EXPECT_THAT(Decide(), ElementsAre(MicroBatches{0, 1, 5}, MicroBatches{2, 3}, MicroBatches{4}));
}

TEST_F(LedgerTest, AfterAMoveItDecidesBeforeRanksAreIdle) {
  Delay(20ms);
  Decide();
  Say(2, 1, 1, 0, 20ms);
  Decide();
  for (const bool has_moved : {true, false}) {
    ledger_.Advance();
    for (Rank rank = 0; rank < kRanks; ++rank) Say(rank, 2, 1, 0);
    EXPECT_THAT(Decide(), IsEmpty());
    EXPECT_EQ(ledger_.NextDeadline(), has_moved ? now_ + 10ms : kNever) << "then each begins its last one";
  }
}

TEST_F(LedgerTest, WhatHadBegunIsNotGrantedAnew) {
  Delay(20ms);
  Decide();
  Say(2, 2, 2, 1);
  EXPECT_THAT(Decide(), IsEmpty());
  EXPECT_EQ(ledger_.NextDeadline(), kNever) << "nothing is left that could move";
}

TEST_F(LedgerTest, NothingMovesThatWouldEndLater) {
  Delay(20ms);
  Decide();
  now_ += 32ms;
  Say(2, 1, 1, 0, 52ms);
  EXPECT_THAT(Decide(), ElementsAre(MicroBatches{0, 1, 5}, MicroBatches{2, 3}, MicroBatches{4}))
      << "so moving takes 32 ms, or 16 on average with 0 before";
  for (const bool is_forgotten : {false, true}) {
    for (int update = 0; is_forgotten && update < 100; ++update) ledger_.Advance();
    ledger_.Advance();
    Delay(20ms);
    EXPECT_EQ(Decide().empty(), !is_forgotten) << "rank 2 is expected to end its second in 20 ms";
    if (is_forgotten) continue;
    const Time start = now_;
    const Time next = ledger_.NextDeadline();
    ASSERT_NE(next, kNever);
    for (const Time time : {next - 1ms, next + 1ms}) {
      now_ = time;
      for (Rank rank : {0, 1}) Say(rank, 2, 2, 2, time - start);
      Say(2, 2, 1, 0, 20ms + time - start);
      EXPECT_EQ(Decide().empty(), time < next);
    }
    now_ = start;
  }
}

TEST_F(LedgerTest, WhoDoesNotComeLosesWhatItHolds) {
  const auto decide = [&] { return ledger_.Decide({true, true, false}, now_); };
  for (Rank rank : {0, 1}) Say(rank, 2, 1, 1);
  EXPECT_THAT(decide(), ElementsAre(MicroBatches{0, 1}, MicroBatches{2, 3}, MicroBatches{}));
  Say(2, 0, 0, 0);
  EXPECT_THAT(decide(), ElementsAre(MicroBatches{0, 1, 5}, MicroBatches{2, 3, 4}, MicroBatches{}));
}

// A job whose micro-batches take 10 ms, and no delays. Messages cost nothing, and end a cycle.
SharedJobConfig Sharing(int ranks, int passes, int updates) {
  const auto cells = static_cast<std::size_t>(ranks * updates);
  SharedJobConfig config;
  config.ranks = ranks;
  config.passes = passes;
  config.updates = updates;
  config.compute = 0.01;
  config.in_first.resize(cells);
  config.in_each.resize(cells);
  config.in_own.resize(cells * static_cast<std::size_t>(passes));
  config.messages = {{0.01, 8}};
  config.cycle = 0.0004;
  return config;
}

double UpdateTime(const SharedJobConfig& config) { return SharedJob(config).Run().ends.back() / config.updates; }

// Over synchronous training: the slowest rank's own micro-batches.
TEST(SharedJobTest, ASteadilySlowRankCostsLittle) {
  for (const auto& [passes, gain] : {std::pair(4, 2.2), std::pair(8, 2.4)}) {
    SharedJobConfig config = Sharing(8, passes, 50);
    for (std::size_t i = 1; i < config.in_each.size(); i += 8) config.in_each[i] = 0.02;
    EXPECT_GT(0.03 * passes / UpdateTime(config), gain);
  }
}

TEST(SharedJobTest, ARankThatIsLateOnceCostsLittle) {
  SharedJobConfig config = Sharing(8, 4, 50);
  for (std::size_t update = 0; update < 50; ++update) config.in_first[8 * update + update * 5 % 8] = 0.04;
  EXPECT_GT(0.08 / UpdateTime(config), 1.45);
}

TEST(SharedJobTest, NothingIsLostWhereNobodyIsSlow) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> jitter(0, 0.001);
  SharedJobConfig config = Sharing(8, 4, 50);
  for (double& delay : config.in_own) delay = jitter(random);
  EXPECT_GT(0.042 / UpdateTime(config), 0.94);
}

TEST(SharedJobTest, SlowMessagesCostNothingWhereNobodyIsSlow) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> jitter(0, 0.001);
  SharedJobConfig config = Sharing(8, 8, 50);
  config.cycle = 0.02;
  for (double& delay : config.in_own) delay = jitter(random);
  EXPECT_LT(UpdateTime(config), 0.1 + 1e-9) << "the cycle after the last micro-batch";
}

TEST(SharedJobTest, EveryMicroBatchIsMadeOnce) {
  SharedJobConfig config = Sharing(3, 4, 3);
  for (std::size_t i = 0; i < 9; i += 4) config.in_each[i] = 0.1;  // one rank of each update is slow
  const std::vector<int> made = SharedJob(config).Run().made;
  for (std::size_t update = 0; update < 3; ++update) {
    EXPECT_EQ(made[3 * update] + made[3 * update + 1] + made[3 * update + 2], 12);
    EXPECT_EQ(made[4 * update], 1);
  }
}

TEST(SharedJobTest, TheBoundIsThatOfTheLongestFirst) {
  SharedJobConfig config = Sharing(2, 2, 1);
  config.in_own = {0, 0.01, 0.03, 0.02};  // so that they take 40, 30, 20 and 10 ms
  EXPECT_THAT(SharedJob(config).Run().bounds, ElementsAre(DoubleNear(0.05, 1e-12)));
  config.in_first = {0.02, 0};
  EXPECT_THAT(SharedJob(config).Run().bounds, ElementsAre(DoubleNear(0.06, 1e-12)));
}

TEST(SharedJobTest, MessagesTravelDuringTheLastMicroBatch) {
  SharedJobConfig config = Sharing(2, 2, 1);
  config.cycle = 0;
  config.messages = {{0.004, 8}, {0.01, 8}};
  config.cost = {0.005, 0};
  EXPECT_NEAR(UpdateTime(config), 0.02 + 0.005, 1e-8) << "that of the first is hidden";
  config.cost = {0.008, 0};
  EXPECT_NEAR(UpdateTime(config), 0.014 + 2 * 0.008, 1e-8) << "the second waits for the first";
}

}  // namespace
}  // namespace horovod_partial
