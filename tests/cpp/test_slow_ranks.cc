#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <tuple>

#include "core/slowness/slow_ranks.h"

namespace horovod_partial {
namespace {

constexpr int kRanks = 8;
constexpr double kStep = 0.03;  // seconds

using Change = SlowRank::Change;
using News = SlowRanks::News;

// A job whose steps vary by 2 %. `factor` says how many times as long a step takes.
struct Job {
  explicit Job(int ranks = kRanks, unsigned seed = 1) : detector(ranks), size(ranks), random(seed) {}

  std::vector<News> Run(int steps, const std::function<double(Rank, std::int64_t)>& factor = {}) {
    std::vector<News> all;
    std::normal_distribution<double> noise(0, 0.02);
    for (int i = 0; i < steps; ++i) {
      std::vector<double> seconds;
      for (Rank rank = 0; rank < size; ++rank)
        seconds.push_back(kStep * std::exp(noise(random)) * (factor ? factor(rank, step) : 1));
      for (const News& news : detector.Step(seconds)) all.push_back(news);
      ++step;
    }
    return all;
  }
  bool NobodyWasSlow() const {
    for (Rank rank = 0; rank < size; ++rank)
      if (!detector.found(rank).empty()) return false;
    return true;
  }

  SlowRanks detector;
  int size;
  std::int64_t step = 0;  // the number of steps so far
  std::mt19937 random;
};

TEST(SlowRanksTest, NoiseAccusesNobody) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    Job job(kRanks, seed);
    EXPECT_TRUE(job.Run(2000).empty()) << "seed " << seed;
  }
  Job job;
  std::normal_distribution<double> noise(0, 0.2);
  std::mt19937 random(1);
  EXPECT_TRUE(job.Run(50'000, [&](Rank, std::int64_t) { return std::exp(noise(random)); }).empty());
}

TEST(SlowRanksTest, LostTimeIsInUnitsOfPresentSteps) {
  Job job;
  job.Run(100, [](Rank, std::int64_t) { return 0.01; });
  job.Run(300, [](Rank rank, std::int64_t) { return rank == 1 ? 1.5 : 1.0; });
  ASSERT_EQ(job.detector.found(1).size(), 1U);
  EXPECT_LT(job.detector.found(1)[0].lost, 500) << "it is 150, but for the time until the change is known";
}

TEST(SlowRanksTest, ARankThatIsAlwaysSlowIsToldOnceWithItsFactor) {
  Job job;
  const auto news = job.Run(400, [](Rank rank, std::int64_t) { return rank == 7 ? 2.0 : 1.0; });
  ASSERT_EQ(news.size(), 1U);
  EXPECT_EQ(news[0].change, Change::kBegins);
  const Slowness found = job.detector.found(7).back();
  EXPECT_EQ(found.kind, SlownessKind::kPersistent);
  EXPECT_EQ(found.begin, 0);
  EXPECT_EQ(found.end, -1);
  EXPECT_EQ(found.steps, 400);
  EXPECT_NEAR(found.factor, 2, 0.02);
  EXPECT_LT(found.low, 2);
  EXPECT_GT(found.high, 2);
  EXPECT_GT(found.low, 1.95);
  EXPECT_LT(found.high, 2.05);
  EXPECT_NEAR(found.lost, 400, 8);
}

TEST(SlowRanksTest, TellsWithinTwelveStepsAndWhenItIsOver) {
  Job job;
  job.Run(100);
  const auto begins = job.Run(12, [](Rank rank, std::int64_t) { return rank == 3 ? 1.5 : 1.0; });
  ASSERT_EQ(begins.size(), 1U);
  EXPECT_EQ(begins[0].slowness.rank, 3);
  EXPECT_EQ(begins[0].slowness.begin, 100);
  const auto ends = job.Run(12);
  ASSERT_EQ(ends.size(), 1U);
  EXPECT_EQ(ends[0].change, Change::kEnds);
  EXPECT_EQ(ends[0].slowness.begin, 100);
  EXPECT_EQ(ends[0].slowness.end, 112);
}

TEST(SlowRanksTest, AShortPauseEndsNoSlowness) {
  Job job;
  job.Run(500, [](Rank rank, std::int64_t step) { return rank == 3 && (step < 400 || step >= 420) ? 1.5 : 1.0; });
  ASSERT_EQ(job.detector.found(3).size(), 1U);
  EXPECT_EQ(job.detector.found(3)[0].kind, SlownessKind::kPersistent);
  EXPECT_EQ(job.detector.found(3)[0].begin, 0);
  EXPECT_NEAR(static_cast<double>(job.detector.found(3)[0].steps), 480, 3);
}

TEST(SlowRanksTest, ARankThatBecomesMuchSlowerIsToldAgain) {
  Job job;
  job.Run(100, [](Rank rank, std::int64_t) { return rank == 3 ? 1.3 : 1.0; });
  const auto news = job.Run(100, [](Rank rank, std::int64_t) { return rank == 3 ? 4.0 : 1.0; });
  ASSERT_GE(news.size(), 1U);
  EXPECT_EQ(news.back().change, Change::kChanges);
  EXPECT_GT(news.back().slowness.factor, 2);
}

TEST(SlowRanksTest, FivePercentAreNoSlowness) {
  Job job;
  job.Run(2000, [](Rank rank, std::int64_t) { return rank == 3 ? 1.05 : 1.0; });
  EXPECT_TRUE(job.NobodyWasSlow());
  job.Run(200, [](Rank rank, std::int64_t) { return rank == 3 ? 1.15 : 1.0; });
  EXPECT_EQ(job.detector.found(3).size(), 1U);
}

TEST(SlowRanksTest, HalfOfTheRanksCanBeSlow) {
  Job job;
  const auto news = job.Run(50, [](Rank rank, std::int64_t) { return rank < kRanks / 2 ? 1.7 : 1.0; });
  EXPECT_EQ(news.size(), 4U);
  for (Rank rank = 0; rank < kRanks; ++rank) EXPECT_EQ(job.detector.found(rank).size(), rank < kRanks / 2 ? 1U : 0U);
}

TEST(SlowRanksTest, FromTheSecondTimeOnItIsBursts) {
  Job job;
  const auto factor = [](Rank rank, std::int64_t step) { return rank == 1 && step / 20 % 2 == 1 ? 3.0 : 1.0; };
  const auto news = job.Run(300, factor);
  std::vector<Change> changes;
  for (const News& one : news) changes.push_back(one.change);
  EXPECT_EQ(changes, (std::vector<Change>{Change::kBegins, Change::kEnds, Change::kBegins}));
  ASSERT_EQ(job.detector.found(1).size(), 1U) << "bursts are one";
  const Slowness found = job.detector.found(1).back();
  EXPECT_EQ(found.kind, SlownessKind::kBursts);
  EXPECT_EQ(found.begin, 20);
  EXPECT_EQ(found.burst, 20);
  EXPECT_EQ(found.period, 40);
  const auto over = job.Run(300);
  ASSERT_EQ(over.size(), 1U);
  EXPECT_EQ(over[0].change, Change::kEnds);
  EXPECT_EQ(over[0].slowness.end, 280);
  EXPECT_EQ(over[0].slowness.length, 260);
  EXPECT_EQ(over[0].slowness.steps, 140);
}

TEST(SlowRanksTest, ABurstThatDoesNotEndIsNone) {
  Job job;
  job.Run(100, [](Rank rank, std::int64_t step) { return rank == 1 && step / 20 % 2 == 1 ? 3.0 : 1.0; });
  const auto news = job.Run(300, [](Rank rank, std::int64_t) { return rank == 1 ? 3.0 : 1.0; });
  ASSERT_EQ(news.size(), 1U);
  EXPECT_EQ(news[0].change, Change::kChanges);
  ASSERT_EQ(job.detector.found(1).size(), 2U);
  EXPECT_EQ(job.detector.found(1)[0].end, 80);
  EXPECT_EQ(job.detector.found(1)[0].length, 60);
  EXPECT_EQ(job.detector.found(1)[0].steps, 40);
  EXPECT_EQ(job.detector.found(1)[1].begin, 100);
  EXPECT_EQ(job.detector.found(1)[1].kind, SlownessKind::kPersistent);
}

TEST(SlowRanksTest, OneBurstAndThenAllSteps) {
  Job job;
  job.Run(400, [](Rank rank, std::int64_t step) {
    return rank == 1 && ((step >= 35 && step < 50) || step >= 85) ? 2.0 : 1.0;
  });
  ASSERT_EQ(job.detector.found(1).size(), 2U);
  const Slowness first = job.detector.found(1)[0];
  EXPECT_EQ(std::tuple(first.kind, first.begin, first.end), std::tuple(SlownessKind::kPersistent, 35, 50));
  EXPECT_EQ(job.detector.found(1)[1].kind, SlownessKind::kPersistent);
  EXPECT_EQ(job.detector.found(1)[1].begin, 85);
}

TEST(SlowRanksTest, SomeStepsAndThenNearlyAll) {
  Job job;
  job.Run(200, [](Rank rank, std::int64_t step) { return rank == 6 && step % 5 == 0 ? 2.0 : 1.0; });
  job.Run(100, [](Rank rank, std::int64_t) { return rank == 6 ? 2.0 : 1.0; });
  ASSERT_EQ(job.detector.found(6).size(), 2U);
  const Slowness some = job.detector.found(6)[0];
  EXPECT_EQ(some.kind, SlownessKind::kRandom);
  EXPECT_EQ(some.end, 200);
  EXPECT_EQ(some.length, 200 - some.begin);
  EXPECT_NEAR(static_cast<double>(some.steps), 40, 2);
  EXPECT_EQ(job.detector.found(6)[1].kind, SlownessKind::kPersistent);
}

TEST(SlowRanksTest, SomeStepsAtRandom) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    Job job(kRanks, seed);
    std::mt19937 random(seed);
    job.Run(600, [&](Rank rank, std::int64_t) { return rank == 2 && random() % 5 == 0 ? 1.8 : 1.0; });
    ASSERT_FALSE(job.detector.found(2).empty()) << "seed " << seed;
    EXPECT_EQ(job.detector.found(2).back().kind, SlownessKind::kRandom) << "seed " << seed;
    const Slowness found = job.detector.found(2).back();
    EXPECT_NEAR(static_cast<double>(found.steps) / static_cast<double>(found.length), 0.2, 0.06) << "seed " << seed;
  }
}

TEST(SlowRanksTest, GrowthIsTold) {
  Job job;
  const auto news =
      job.Run(300, [](Rank rank, std::int64_t step) { return rank == 0 ? 1 + static_cast<double>(step) / 150 : 1.0; });
  ASSERT_GE(news.size(), 2U);
  EXPECT_EQ(news.back().change, Change::kChanges);
  EXPECT_EQ(job.detector.found(0).size(), 1U);
  EXPECT_EQ(job.detector.found(0).back().kind, SlownessKind::kGrowing);
}

TEST(SlowRanksTest, LongStepsOfAllAFewPausesAndAFasterRankAccuseNobody) {
  const std::function<double(Rank, std::int64_t)> factors[] = {
      [](Rank, std::int64_t step) { return step % 10 == 0 ? 5.0
                                           : step < 200   ? 1.0
                                                          : 2.0; },
      [](Rank rank, std::int64_t step) { return rank == 5 && step % 150 == 100 ? 50.0 : 1.0; },
      [](Rank rank, std::int64_t) { return rank == 5 ? 0.5 : 1.0; },
  };
  for (const auto& factor : factors) {
    Job job;
    job.Run(400, factor);
    EXPECT_TRUE(job.NobodyWasSlow()) << &factor - factors;
  }
}

TEST(SlowRanksTest, SamplesOfManyLengthsAccuseNobody) {
  for (const int ranks : {2, 3, 4, 8})
    for (unsigned seed = 1; seed <= 10; ++seed) {
      Job job(ranks, seed);
      std::mt19937 random(seed);
      std::lognormal_distribution<double> length(0, 0.4);
      job.Run(500, [&](Rank, std::int64_t) { return length(random); });
      EXPECT_TRUE(job.NobodyWasSlow()) << ranks << " ranks, seed " << seed;
    }
}

TEST(SlowRanksTest, OfTwoRanksTheSlowerOneIsSlow) {
  Job job(2);
  job.Run(100, [](Rank rank, std::int64_t) { return rank == 1 ? 1.4 : 1.0; });
  EXPECT_TRUE(job.detector.found(0).empty());
  ASSERT_EQ(job.detector.found(1).size(), 1U);
  EXPECT_EQ(job.detector.found(1)[0].kind, SlownessKind::kPersistent);
}

TEST(SlowRanksTest, RanksThatAreMissingAreNotCompared) {
  Job job(4);
  const double none = std::numeric_limits<double>::quiet_NaN();
  job.Run(200, [&](Rank rank, std::int64_t step) { return rank == 0 && step > 50 ? none : rank == 3 ? 2.0 : 1.0; });
  EXPECT_EQ(job.detector.found(3).size(), 1U);
  EXPECT_TRUE(job.detector.found(0).empty());
  EXPECT_TRUE(job.detector.Step({none, none, none, 1}).empty()) << "one rank cannot be compared";
  EXPECT_THROW(job.detector.Step({1, 1, 1}), std::invalid_argument);
}

TEST(SlowRanksTest, TimesThatAreNoneDoNoHarm) {
  SlowRanks detector(3);
  for (int step = 0; step < 100; ++step) EXPECT_TRUE(detector.Step({0, 0, 0}).empty());
  const double infinity = std::numeric_limits<double>::infinity();
  detector.Step({infinity, -1, 0});
  detector.Step({infinity, infinity, infinity});
  std::size_t told = 0;
  for (int step = 0; step < 100; ++step) told += detector.Step({1, 1, 2}).size();
  EXPECT_EQ(told, 1U);
  EXPECT_THROW(detector.found(3), std::out_of_range);
}

TEST(SlowRanksTest, ASlowMachineAmongSamplesOfManyLengths) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    Job job(kRanks, seed);
    std::mt19937 random(seed);
    std::lognormal_distribution<double> length(0, 0.4);
    job.Run(300, [&](Rank rank, std::int64_t) { return length(random) * (rank == 4 ? 1.5 : 1); });
    for (Rank rank = 0; rank < kRanks; ++rank)
      EXPECT_EQ(job.detector.found(rank).empty(), rank != 4) << "rank " << rank << ", seed " << seed;
  }
}

// A rank beside others that vary much: a slow step is clearly slow, and yet little evidence that nearly all steps are.
struct RankBesideNoise {
  std::vector<Change> Run(int steps, const std::function<bool(std::int64_t)>& is_slow, double level = 0.3) {
    std::vector<Change> changes;
    for (int i = 0; i < steps; ++i, ++step) {
      ComparedStep one;
      one.step = step;
      one.slow = is_slow(step);
      one.ratio = one.slow ? std::log(2.4) : 0;
      one.level = one.slow ? level : -level / 5;
      one.chance = 0.05;
      one.lost = one.slow ? 1.4 : 0;
      if (const Change change = rank.Observe(one); change != Change::kNone) changes.push_back(change);
    }
    return changes;
  }
  const Slowness& Last() const { return rank.found().back(); }

  SlowRank rank{1, 4};
  std::int64_t step = 0;  // the number of steps so far
};

TEST(SlowRankTest, BesideNoiseTheFirstBurstIsOneOfTheBursts) {
  RankBesideNoise of;
  const auto changes = of.Run(200, [](std::int64_t step) { return step % 50 >= 35; });
  EXPECT_EQ(changes, (std::vector<Change>{Change::kBegins, Change::kEnds, Change::kBegins}));
  ASSERT_EQ(of.rank.found().size(), 1U) << "bursts are one";
  EXPECT_EQ(of.Last().kind, SlownessKind::kBursts);
  EXPECT_EQ(of.Last().begin, 35);
  EXPECT_EQ(of.Last().burst, 15);
  EXPECT_EQ(of.Last().period, 50);
  EXPECT_EQ(of.Last().steps, 60);
  EXPECT_EQ(of.Last().length, 165);
}

TEST(SlowRankTest, ABurstIsFoundEvenIfItEndsTooSoonForTheEvidenceOfNearlyAllSteps) {
  RankBesideNoise of;
  of.Run(35, [](std::int64_t) { return false; });
  EXPECT_TRUE(of.Run(12, [](std::int64_t) { return true; }, 0.9).empty()) << "nearly all steps have evidence of 10.8";
  EXPECT_EQ(of.Run(40, [](std::int64_t) { return false; }), (std::vector<Change>{Change::kBegins, Change::kEnds}));
  EXPECT_EQ(std::tuple(of.Last().kind, of.Last().begin, of.Last().end), std::tuple(SlownessKind::kPersistent, 35, 47));
}

TEST(SlowRankTest, ABurstWithLittleEvidenceOfItsOwnCountsOnceThereAreOthers) {
  RankBesideNoise of;
  const auto in_burst = [](std::int64_t step) { return step % 50 >= 35 && step % 50 < 40; };
  EXPECT_TRUE(of.Run(50, in_burst, 1.8).empty()) << "evidence of 9";
  EXPECT_FALSE(of.Run(100, in_burst, 2.5).empty());
  ASSERT_EQ(of.rank.found().size(), 1U);
  EXPECT_EQ(of.Last().kind, SlownessKind::kBursts);
  EXPECT_EQ(of.Last().begin, 35);
  EXPECT_EQ(of.Last().steps, 15);
}

TEST(SlowRankTest, ARankThatIsSlowInAllStepsIsNotSlowAtRandom) {
  RankBesideNoise of;
  EXPECT_EQ(of.Run(8, [](std::int64_t) { return true; }), std::vector<Change>{Change::kBegins});
  EXPECT_EQ(of.Last().kind, SlownessKind::kPersistent);
  EXPECT_EQ(of.Last().Describe(),
            "takes 2.4 times (95 %: 2.4 to 2.4) as long as the median rank, in 8 of 8 steps since step 0");
  EXPECT_EQ(of.Run(60, [](std::int64_t step) { return step % 3 == 0; }), std::vector<Change>{Change::kChanges});
  EXPECT_EQ(of.Last().kind, SlownessKind::kRandom) << "later steps were slow one by one";
}

TEST(SlownessTest, SaysHowSlowARankIs) {
  Slowness found{3, SlownessKind::kPersistent, 120};
  found.steps = found.length = 40;
  found.factor = 2.1;
  found.low = 1.95;
  found.high = 2.2;
  EXPECT_EQ(found.Describe(),
            "takes 2.1 times (95 %: 1.95 to 2.2) as long as the median rank, in 40 of 40 steps since step 120");
  found.kind = SlownessKind::kBursts;
  found.length = 80;
  found.burst = 20;
  found.period = 40;
  found.end = 200;
  EXPECT_EQ(
      found.Describe(),
      "takes 2.1 times (95 %: 1.95 to 2.2) as long as the median rank, in 40 of 80 steps from step 120 to 199, in "
      "bursts of 20 steps every 40");
}

}  // namespace
}  // namespace horovod_partial
