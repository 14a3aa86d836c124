// Who can still bring something to which bucket, with threads that do what they are told and a clock that is a number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "engine/possible_arrivals.h"
#include "harness/worker.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
using test::Worker;
using testing::ElementsAre;
using testing::IsEmpty;

class PossibleArrivalsTest : public testing::Test {
 protected:
  using Bucket = PossibleArrivals::Bucket;

  std::unique_ptr<Bucket> Make(const std::string& name) { return std::make_unique<Bucket>(arrivals_, this, name); }
  // One round of a bucket.
  void Run(Bucket& bucket, Worker& arrives, Worker& collects) {
    arrives.Do([&] { bucket.Arrive({}, round_, now_); });
    bucket.SetOpen(true, now_);
    bucket.SetOpen(false, now_);
    bucket.Done(round_, now_);
    collects.Do([&] { bucket.EndWait(true, round_, now_); });
  }
  void Run(Bucket& bucket, Worker& worker) { Run(bucket, worker, worker); }
  void HaveTwoBuckets() {
    Run(*others_, busy_);
    Run(*bucket_, first_);
  }
  void HaveOneBucket() {
    others_.reset();
    waits_.reset();
    Run(*bucket_, first_);
  }
  // The thread waits for a round that nobody closes.
  void Wait(Bucket& bucket, Worker& worker) {
    worker.Do([&] {
      bucket.Arrive({}, round_, now_);
      bucket.SetOpen(true, now_);
      bucket.BeginWait(now_);
    });
    now_ += 6ms;
  }
  void ArriveInGraph(Bucket& bucket, std::int64_t run) {
    bucket.Arrive({Caller::Kind::kGraph, run}, round_, now_);
    bucket.SetOpen(true, now_);
  }
  void End(Bucket& bucket) { bucket.Done(round_, now_); }

  // `foreign`: of a front end that tells of no waits, unless it says so.
  PossibleArrivals::Away Look(const PossibleArrivals::Foreign& foreign = {}, bool flushes = false) const {
    return arrivals_->Look(this, now_, foreign, flushes, PossibleArrivals::Thresholds());
  }
  std::unique_ptr<PossibleArrivals::ForeignWait> Park(Worker& worker) {
    std::unique_ptr<PossibleArrivals::ForeignWait> wait;
    worker.Do([&] { wait = std::make_unique<PossibleArrivals::ForeignWait>(arrivals_, now_); });
    return wait;
  }

  const std::shared_ptr<PossibleArrivals> arrivals_ = std::make_shared<PossibleArrivals>();
  Time now_ = 1s;
  Round round_ = 0;
  // Its thread is never said to wait, so that not all can be away.
  Worker busy_;
  std::unique_ptr<Bucket> others_ = Make("others");
  Worker first_;
  Worker second_;
  std::unique_ptr<Bucket> bucket_ = Make("bucket");
  std::unique_ptr<Bucket> waits_ = Make("waits");
};

TEST_F(PossibleArrivalsTest, NobodyIsAwayAtFirst) {
  EXPECT_TRUE(Look().waiting.empty());
  EXPECT_TRUE(Look().absent.empty());
}

TEST_F(PossibleArrivalsTest, WhoCollectsBrings) {
  Run(*others_, busy_);
  Run(*bucket_, second_, first_);
  Wait(*waits_, second_);
  EXPECT_THAT(Look().waiting.names, IsEmpty()) << "the thread that arrived";
  Wait(*waits_, first_);
  EXPECT_THAT(Look().waiting.names, ElementsAre("bucket"));
  EXPECT_FALSE(Look().waiting.all);
  EXPECT_TRUE(Look().absent.empty());
}

TEST_F(PossibleArrivalsTest, AWaitCountsWhenItIsLong) {
  HaveTwoBuckets();
  Wait(*waits_, first_);
  now_ -= 1ms;
  EXPECT_TRUE(Look().waiting.empty());
  now_ += 1ms;
  EXPECT_THAT(Look().waiting.names, ElementsAre("bucket"));
  waits_->SetOpen(false, now_);
  EXPECT_TRUE(Look().waiting.empty()) << "its round has begun";
}

TEST_F(PossibleArrivalsTest, WhereAllWaitTheyCanComeNowhere) {
  others_.reset();
  Run(*bucket_, first_);
  Wait(*waits_, first_);
  EXPECT_TRUE(Look().waiting.all);
  EXPECT_THAT(Look().waiting.names, IsEmpty());
}

TEST_F(PossibleArrivalsTest, WhoArrivesBringsWhereNoCollectorLives) {
  Run(*others_, busy_);
  {
    Worker ends;
    Run(*bucket_, second_, ends);
    Wait(*waits_, second_);
    EXPECT_TRUE(Look().waiting.empty());
  }
  EXPECT_THAT(Look().waiting.names, ElementsAre("bucket"));
}

TEST_F(PossibleArrivalsTest, ABucketWhoseThreadsHaveEndedIsLeftByAFlush) {
  waits_.reset();
  Run(*others_, busy_);
  {
    Worker ends;
    Run(*bucket_, ends);
  }
  first_.Do([this] { arrivals_->BeginFlush(this, now_); });
  EXPECT_TRUE(Look().absent.empty());
  EXPECT_THAT(Look({}, true).absent.names, ElementsAre("bucket"));
}

TEST_F(PossibleArrivalsTest, ABucketMayBeHandedOver) {
  HaveTwoBuckets();
  for (round_ = 1; round_ <= 8; ++round_) Run(*bucket_, second_);
  Wait(*waits_, second_);
  EXPECT_TRUE(Look().waiting.empty()) << "the first one may come back";
  waits_->SetOpen(false, now_);
  round_ = 9;
  Run(*bucket_, second_);
  Wait(*bucket_, busy_);
  bucket_->SetOpen(false, now_);
  Wait(*waits_, second_);
  EXPECT_TRUE(Look().waiting.Has("bucket"));
}

TEST_F(PossibleArrivalsTest, AFlushExemptsTheBucketsOfItsThread) {
  waits_.reset();
  HaveTwoBuckets();
  std::shared_ptr<PossibleArrivals::Bringer> flushing;
  first_.Do([&] { flushing = arrivals_->BeginFlush(this, now_); });
  now_ += 6ms;
  EXPECT_THAT(Look({}, true).absent.names, ElementsAre("bucket"));
  EXPECT_THAT(Look({}, true).waiting.names, ElementsAre("bucket"));
  arrivals_->EndFlush(*flushing, now_);
  EXPECT_TRUE(Look().absent.empty());
}

TEST_F(PossibleArrivalsTest, AFlushOfAnotherEngineIsAWait) {
  HaveTwoBuckets();
  first_.Do([&] { arrivals_->BeginFlush(&round_, now_); });
  now_ += 6ms;
  EXPECT_THAT(Look().waiting.names, ElementsAre("bucket"));
  EXPECT_TRUE(Look().absent.empty());
}

TEST_F(PossibleArrivalsTest, AThreadInAForeignCollectiveIsAbsent) {
  waits_.reset();
  HaveTwoBuckets();
  auto wait = Park(first_);
  now_ += 101ms;
  EXPECT_THAT(Look().absent.names, ElementsAre("bucket"));
  EXPECT_FALSE(Look().blocked) << "another thread trains";
  const auto other = Park(busy_);
  now_ += 101ms;
  EXPECT_TRUE(Look().absent.all);
  EXPECT_TRUE(Look().blocked);
  wait.reset();
  EXPECT_THAT(Look().absent.names, ElementsAre("others"));
  now_ -= 2ms;
  EXPECT_TRUE(Look().absent.empty()) << "not for long";
}

// Whoever has the core: the thread may not have run since.
TEST_F(PossibleArrivalsTest, AThreadWhoseCollectiveIsOverMayCome) {
  HaveOneBucket();
  const auto context = std::make_shared<int>();
  const PossibleArrivals::Collective awaited{"loss", context};
  const PossibleArrivals::Collective later{"loss", std::make_shared<int>()};
  const auto wait = Park(first_);
  ASSERT_TRUE(arrivals_->AwaitsForeign());
  now_ += 101ms;
  arrivals_->EndForeignWaits({awaited});
  EXPECT_FALSE(Look().absent.empty());
  arrivals_->EndForeignWaits({later, awaited});
  EXPECT_FALSE(Look().absent.empty());
  arrivals_->EndForeignWaits({later});
  EXPECT_TRUE(Look().absent.empty());
  EXPECT_FALSE(Look().blocked);
  EXPECT_FALSE(arrivals_->AwaitsForeign());
}

TEST_F(PossibleArrivalsTest, AThreadThatPollsACollectiveThatIsOverMayCome) {
  HaveOneBucket();
  const PossibleArrivals::Foreign foreign{now_, true};
  for (int i = 0; i < 3; ++i) {
    first_.Do([&] { arrivals_->Polled(false, now_); });
    now_ += 60ms;
  }
  arrivals_->EndForeignWaits({{"loss", std::make_shared<int>()}});
  EXPECT_FALSE(Look(foreign).absent.empty());
  arrivals_->EndForeignWaits({});
  EXPECT_TRUE(Look(foreign).absent.empty());
  EXPECT_FALSE(arrivals_->AwaitsForeign());
}

TEST(PossibleArrivalsOfNothingTest, AProcessWithoutBucketsIsAbsentInAForeignCollective) {
  const auto arrivals = std::make_shared<PossibleArrivals>();
  const auto look = [&](bool told) {
    return arrivals->Look(nullptr, 6s + 1ns, {5s, told}, false, PossibleArrivals::Thresholds());
  };
  EXPECT_TRUE(look(false).absent.all);
  EXPECT_FALSE(look(false).blocked) << "it may prepare its training meanwhile";
  EXPECT_TRUE(look(true).absent.empty()) << "nobody waits for it";
  const PossibleArrivals::ForeignWait wait(arrivals, 5s);
  EXPECT_TRUE(look(true).absent.all);
  EXPECT_TRUE(look(true).blocked);
  const PossibleArrivals::Bucket bucket(arrivals, nullptr, "bucket");
  EXPECT_TRUE(look(true).absent.empty()) << "some thread may be on its way there";
}

// A loss that has been posted, or another thread that waits for a collective, says nothing of a thread that computes.
TEST_F(PossibleArrivalsTest, WhoIsNotKnownToWaitComputes) {
  HaveOneBucket();
  const Time since = now_;
  now_ += 20s;
  EXPECT_TRUE(Look({since, true}).absent.empty());
  EXPECT_TRUE(Look({since, false}).absent.all) << "it is silent, and nobody tells who waits";
  EXPECT_FALSE(Look({since, false}).blocked) << "a guess";
  Run(*bucket_, first_);
  const auto of_no_bringer = Park(second_);
  now_ += 500ms;
  EXPECT_TRUE(Look({since, true}).absent.empty());
  now_ += 201s;
  EXPECT_TRUE(Look({since, true}).absent.all) << "it is silent, and may wait for that thread";
  EXPECT_FALSE(Look({since, true}).blocked) << "a guess";
}

TEST_F(PossibleArrivalsTest, WhoAsksInVainWaitsWhenItIsSilent) {
  HaveOneBucket();
  now_ += 10ms;
  Run(*bucket_, first_);  // an interval of 10 ms
  const Time since = now_;
  const auto look = [&] { return Look({since, true}); };
  now_ += 900ms;
  first_.Do([this] { arrivals_->Polled(false, now_); });
  EXPECT_TRUE(look().absent.empty());
  now_ += 200ms;
  EXPECT_TRUE(look().absent.all);
  EXPECT_FALSE(look().blocked) << "a guess";
  now_ += 900ms;
  EXPECT_TRUE(look().absent.empty()) << "it has not asked for long";
}

TEST_F(PossibleArrivalsTest, WhoAsksAgainAndAgainWaits) {
  HaveOneBucket();
  const auto look = [&, since = now_] { return Look({since, true}); };
  const auto ask = [&] { first_.Do([this] { arrivals_->Polled(false, now_); }); };
  ask();
  now_ += 90ms;
  ask();
  EXPECT_TRUE(look().absent.empty()) << "not for long";
  now_ += 50ms;
  EXPECT_TRUE(look().absent.all);
  EXPECT_TRUE(look().blocked);
  now_ += 51ms;
  EXPECT_TRUE(look().absent.empty()) << "it may compute meanwhile";
  ask();
  EXPECT_TRUE(look().absent.empty());
}

TEST_F(PossibleArrivalsTest, AWaitForHorovodIsNoIntervalOfTraining) {
  HaveOneBucket();
  for (int epoch = 0; epoch < 3; ++epoch) {
    now_ += 10ms;
    Run(*bucket_, first_);
    const Time since = now_;
    now_ += 1001ms;
    EXPECT_TRUE(Look({since, false}).absent.all) << "in epoch " << epoch;
    now_ += 1s;
    Run(*bucket_, first_);
  }
}

TEST_F(PossibleArrivalsTest, ASilentProcessIsJudgedAsAWhole) {
  HaveTwoBuckets();
  now_ += 10ms;
  Run(*others_, busy_);  // intervals of 10 ms
  Run(*bucket_, first_);
  Wait(*waits_, second_);
  const Time since = now_ - 6ms;
  now_ = since + 1s;
  EXPECT_TRUE(Look().waiting.empty());
  now_ += 1ms;
  EXPECT_TRUE(Look().waiting.all);
  EXPECT_FALSE(Look().blocked) << "the silent thread may compute";
}

TEST_F(PossibleArrivalsTest, NotBeforeTenTimesItsLongestInterval) {
  HaveTwoBuckets();
  now_ += 10ms;
  Run(*others_, busy_);
  now_ += 490ms;
  Run(*bucket_, first_);
  Wait(*waits_, second_);
  const Time since = now_ - 6ms;
  now_ = since + 2s;
  EXPECT_THAT(Look().waiting.names, ElementsAre("others"));
  now_ = since + 5001ms;
  EXPECT_TRUE(Look().waiting.all);
}

TEST_F(PossibleArrivalsTest, AThreadThatIsBlockedAtItsArrivalWaits) {
  HaveTwoBuckets();
  first_.Do([this] { waits_->Arrive({Caller::Kind::kBlockedThread}, round_, now_); });
  waits_->SetOpen(true, now_);
  EXPECT_EQ(waits_->UnattendedSince(), now_);
  now_ += 6ms;
  EXPECT_THAT(Look().waiting.names, ElementsAre("bucket"));
  waits_->Done(round_, now_);
  EXPECT_TRUE(Look().waiting.empty());
  EXPECT_EQ(waits_->UnattendedSince(), kNever);
}

// --- Graphs

class GraphArrivalsTest : public PossibleArrivalsTest {
 protected:
  std::unique_ptr<Bucket> tape_ = Make("tape");  // with bucket_ in one graph
  std::unique_ptr<Bucket> other_ = Make("other graph");

  void SetUp() override {
    Run(*others_, busy_);
    ArriveInGraph(*bucket_, 1);
    ArriveInGraph(*tape_, 1);
    End(*bucket_);
    End(*tape_);
  }
};

TEST_F(GraphArrivalsTest, ARunWaitsWhenAllItsTapesHaveArrived) {
  ArriveInGraph(*other_, 2);
  End(*other_);
  ArriveInGraph(*bucket_, 3);
  now_ += 6ms;
  EXPECT_TRUE(Look().waiting.empty()) << "the other tape is being computed";
  ArriveInGraph(*tape_, 3);
  EXPECT_EQ(tape_->UnattendedSince(), now_);
  now_ += 6ms;
  EXPECT_THAT(Look().waiting.names, ElementsAre("other graph"));
}

TEST_F(GraphArrivalsTest, GraphsThatRunAtOnceHaveTwoBringers) {
  ArriveInGraph(*other_, 2);
  ArriveInGraph(*bucket_, 3);
  ArriveInGraph(*tape_, 3);
  End(*other_);
  now_ += 6ms;
  EXPECT_TRUE(Look().waiting.empty());
}

TEST_F(GraphArrivalsTest, ARunThatIsOverDoesNotWait) {
  ArriveInGraph(*other_, 2);
  End(*other_);
  now_ += 6ms;
  EXPECT_TRUE(Look().waiting.empty());
}

TEST_F(PossibleArrivalsTest, TheLongestWaitLastsUntilItsResultIsThere) {
  const auto a = Make("a"), b = Make("b");
  EXPECT_EQ(arrivals_->LongestWait().since, kNever);
  Wait(*a, first_);
  const Time began = arrivals_->LongestWait().since;
  EXPECT_EQ(arrivals_->LongestWait().what, "a round of a");
  EXPECT_EQ(arrivals_->LongestWait().engine, this);
  Wait(*b, second_);
  a->SetOpen(false, now_);  // it is being reduced, which another rank may hold up
  EXPECT_EQ(arrivals_->LongestWait().since, began);
  a->Done(round_, now_);
  first_.Do([&] { a->EndWait(true, round_, now_); });
  EXPECT_EQ(arrivals_->LongestWait().what, "a round of b");
  second_.Do([&] { b->EndWait(false, round_, now_); });
  EXPECT_EQ(arrivals_->LongestWait().since, kNever);
}

TEST_F(PossibleArrivalsTest, AnEndIsTheLongestWaitOnlyWhereThereIsNoOther) {
  const PossibleArrivals::FlushWait end(arrivals_, this, true, now_);
  EXPECT_TRUE(arrivals_->LongestWait().ends);
  {
    const PossibleArrivals::FlushWait flush(arrivals_, this, false, now_ + 1s);
    EXPECT_EQ(arrivals_->LongestWait().what, "a flush");
    const auto a = Make("a");
    Wait(*a, first_);
    EXPECT_EQ(arrivals_->LongestWait().what, "a round of a") << "it is older";
    first_.Do([&] { a->EndWait(false, round_, now_); });
  }
  EXPECT_TRUE(arrivals_->LongestWait().ends);
}

TEST_F(PossibleArrivalsTest, AGraphWaitsWhenItHasArrivedInAllItsBuckets) {
  const auto a = Make("a");
  ArriveInGraph(*a, 1);
  EXPECT_EQ(arrivals_->LongestWait().what, "a round of a");
  End(*a);
  EXPECT_EQ(arrivals_->LongestWait().since, kNever);
}

}  // namespace
}  // namespace horovod_partial
