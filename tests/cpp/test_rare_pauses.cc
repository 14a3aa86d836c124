#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "core/slowness/slow_ranks.h"

namespace horovod_partial {
namespace {

constexpr double kStep = 0.04;  // seconds
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

using Change = SlowRank::Change;
using News = SlowRanks::News;
using Times = std::function<double(Rank, std::int64_t)>;  // what is added to a step of a rank, in seconds

Times Pauses(Rank which, std::int64_t every, double seconds) {
  return [=](Rank rank, std::int64_t step) { return rank == which && step % every == every - 1 ? seconds : 0; };
}

// A job whose steps vary by 3 %.
struct Job {
  explicit Job(int ranks = 8, unsigned seed = 1) : detector(ranks), size(ranks), random(seed) {}

  std::vector<News> Run(int steps, const Times& more = {}) {
    std::vector<News> all;
    std::normal_distribution<double> noise(0, 0.03);
    for (int i = 0; i < steps; ++i, ++step) {
      std::vector<double> seconds;
      for (Rank rank = 0; rank < size; ++rank)
        seconds.push_back(usual * std::exp(noise(random)) + (more ? more(rank, step) : 0));
      for (const News& news : detector.Step(seconds)) all.push_back(news);
    }
    for (Rank rank = 0; rank < size; ++rank) {
      const std::vector<Slowness> found = detector.found(rank);
      const auto present = detector.present(rank);
      const bool lasts = !found.empty() && found.back().end < 0;
      EXPECT_EQ(present.has_value(), lasts);
      if (present) {
        EXPECT_EQ(present->begin, found.back().begin);
      }
    }
    return all;
  }
  // Returns how many steps it takes until something is told.
  std::int64_t Until(const Times& more, int most = 20'000) {
    const std::int64_t before = step;
    while (step < before + most && Run(1, more).empty()) continue;
    return step - before;
  }
  std::size_t Found() const {
    std::size_t found = 0;
    for (Rank rank = 0; rank < size; ++rank) found += detector.found(rank).size();
    return found;
  }

  SlowRanks detector;
  int size;
  double usual = kStep;  // the seconds of a step
  std::int64_t step = 0;
  std::mt19937 random;
};

TEST(RarePausesTest, ARankThatEvaluatesAloneIsToldWithItsFigures) {
  Job job;
  const auto news = job.Run(300, Pauses(0, 50, 5));
  ASSERT_EQ(news.size(), 1U);
  EXPECT_EQ(news[0].change, Change::kBegins);
  job.Run(700, Pauses(0, 50, 5));
  ASSERT_EQ(job.Found(), 1U);
  const Slowness found = job.detector.found(0).back();
  EXPECT_EQ(found.kind, SlownessKind::kPauses);
  EXPECT_EQ(found.rank, 0);
  EXPECT_EQ(found.begin, 49);
  EXPECT_EQ(found.end, -1);
  EXPECT_EQ(found.steps, 20);
  EXPECT_EQ(found.length, 951);
  EXPECT_EQ(found.period, 50);
  EXPECT_NEAR(found.pause, 5, 0.01);
  EXPECT_NEAR(found.share, 5 / 7.0, 0.01);
  EXPECT_NEAR(found.factor, 3.5, 0.2);
  EXPECT_NEAR(found.lost, 20 * 125, 100);
  EXPECT_EQ(found.Describe(),
            "pauses for 5.0 s every 50 steps: the others wait for it for 71 % of the time, since step 49");
}

TEST(RarePausesTest, TheNumberOfPausesUntilItIsToldFallsWithTheNumberOfRanks) {
  const std::pair<int, int> expected[] = {{2, 16}, {4, 9}, {8, 6}, {32, 5}, {512, 4}};
  for (const auto& [ranks, pauses] : expected)
    EXPECT_EQ(Job(ranks).Until(Pauses(ranks - 1, 50, 1)), 50 * pauses) << ranks << " ranks";
}

TEST(RarePausesTest, TimeWithoutPausesDelaysNothing) {
  Job job;
  EXPECT_TRUE(job.Run(20'000).empty());
  EXPECT_EQ(job.Until(Pauses(0, 200, 2)), 6 * 200);
  EXPECT_NEAR(job.detector.found(0).back().share, 0.2, 0.01);
  EXPECT_EQ(job.detector.found(0).back().begin, 20'199);
}

TEST(RarePausesTest, WhenPausesAreOverThatIsToldOnce) {
  Job job;
  job.Run(500, Pauses(3, 50, 1));
  const auto news = job.Run(149);
  EXPECT_TRUE(news.empty());
  const auto over = job.Run(1000);
  ASSERT_EQ(over.size(), 1U);
  EXPECT_EQ(over[0].change, Change::kEnds);
  EXPECT_EQ(over[0].slowness.end, 500);
  ASSERT_EQ(job.Found(), 1U);
  EXPECT_EQ(job.detector.found(3)[0], over[0].slowness);
  EXPECT_EQ(over[0].slowness.Describe(),
            "pauses for 1.00 s every 50 steps: the others wait for it for 32 % of the time, from step 49 to 499");
  // The evidence begins anew.
  EXPECT_EQ(job.step % 50, 49);
  EXPECT_EQ(job.Until(Pauses(3, 50, 1)), 251);
  EXPECT_EQ(job.detector.found(3).size(), 2U);
  EXPECT_EQ(job.detector.found(3)[1].steps, 6);
}

TEST(RarePausesTest, APauseLongBeforeIsNotTheBegin) {
  for (const int ranks : {8, 512}) {
    Job job(ranks);
    job.Run(1000);
    job.Run(1, [](Rank rank, std::int64_t) { return rank == 0 ? 5 : 0; });
    job.Run(999);
    job.Run(1000, Pauses(0, 50, 5));
    ASSERT_EQ(job.Found(), 1U);
    EXPECT_EQ(job.detector.found(0)[0].begin, 2049) << ranks << " ranks";
  }
}

TEST(RarePausesTest, PausesThatAreTooShortAreNotTheBegin) {
  Job job;
  job.Run(600, Pauses(0, 150, 0.03));
  job.Run(900, Pauses(0, 150, 5));
  ASSERT_EQ(job.Found(), 1U);
  EXPECT_EQ(job.detector.found(0)[0].begin, 749);
  EXPECT_EQ(job.detector.found(0)[0].steps, 6);
}

TEST(RarePausesTest, PausesOfChangingLengthAreOneFinding) {
  for (const double last : {60.0, 0.5, 0.2}) {
    Job job;
    job.Run(500, Pauses(0, 50, 5));
    job.Run(5000, Pauses(0, 50, last));
    ASSERT_EQ(job.Found(), 1U) << last << " s";
    EXPECT_EQ(job.detector.found(0)[0].begin, 49);
    EXPECT_EQ(job.detector.found(0)[0].end, -1);
    EXPECT_NEAR(job.detector.found(0)[0].pause, last, 0.1);
    EXPECT_EQ(job.detector.found(0)[0].steps, 110);
  }
}

TEST(RarePausesTest, PausesAtRandomTimesAndOfAllLengths) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    Job job(8, seed);
    std::mt19937 random(seed);
    std::exponential_distribution<double> length(1);
    job.Run(3000, [&](Rank rank, std::int64_t) { return rank == 5 && random() % 60 == 0 ? 2 * length(random) : 0; });
    for (Rank rank = 0; rank < 8; ++rank)
      EXPECT_EQ(job.detector.found(rank).empty(), rank != 5) << "rank " << rank << ", seed " << seed;
    for (const Slowness& found : job.detector.found(5))
      EXPECT_EQ(found.kind, SlownessKind::kPauses) << found.Describe() << ", seed " << seed;
  }
}

TEST(RarePausesTest, PausesDoNotHideThatARankIsSlow) {
  const Times always = [](Rank rank, std::int64_t) { return rank == 0 ? kStep : 0; };
  const Times bursts = [](Rank rank, std::int64_t step) { return rank == 0 && step % 200 < 40 ? 2 * kStep : 0; };
  for (const bool is_always : {true, false})
    for (const double pause : {1.0, 5.0}) {
      Job job;
      job.Run(1000, Pauses(0, 50, pause));
      const auto news = job.Run(1000, [&](Rank rank, std::int64_t step) {
        return Pauses(0, 50, pause)(rank, step) + (is_always ? always : bursts)(rank, step);
      });
      ASSERT_FALSE(news.empty());
      EXPECT_EQ(news.back().slowness.kind, is_always ? SlownessKind::kPersistent : SlownessKind::kBursts);
      const auto found = job.detector.found(0);
      EXPECT_EQ(found.back().kind, news.back().slowness.kind) << "pauses of " << pause << " s";
      EXPECT_EQ(found.back().end, -1);
      EXPECT_EQ(found[0].kind, SlownessKind::kPauses);
      EXPECT_EQ(found[0].begin, 49);
      EXPECT_NE(found[0].end, -1) << "two findings are shown";
      // The pauses go on when the slowness is over.
      job.Run(1500, Pauses(0, 50, pause));
      EXPECT_EQ(job.detector.found(0).back().kind, SlownessKind::kPauses);
      EXPECT_EQ(job.detector.found(0).back().begin, 49);
      EXPECT_EQ(job.detector.found(0).back().end, -1);
    }
}

TEST(RarePausesTest, SlownessDoesNotHidePausesThatCostMore) {
  Job job;
  const Times always = [](Rank rank, std::int64_t) { return rank == 0 ? 0.2 * kStep : 0; };
  job.Run(1000, always);
  EXPECT_EQ(job.detector.found(0).back().kind, SlownessKind::kPersistent);
  const auto both = [&](Rank rank, std::int64_t step) { return always(rank, step) + Pauses(0, 50, 5)(rank, step); };
  job.Run(1000, both);
  EXPECT_EQ(job.detector.found(0).size(), 1U) << "one finding is shown at a time";
  EXPECT_EQ(job.detector.found(0).back().kind, SlownessKind::kPauses);
  EXPECT_EQ(job.detector.found(0).back().begin, 1049);
  // When the pauses are over, what has gone on all the time is told again.
  const auto news = job.Run(500, always);
  ASSERT_EQ(news.size(), 2U);
  EXPECT_EQ(news[0].change, Change::kEnds);
  EXPECT_EQ(news[0].slowness.kind, SlownessKind::kPauses);
  EXPECT_EQ(news[1].change, Change::kBegins);
  EXPECT_EQ(news[1].slowness.kind, SlownessKind::kPersistent);
  EXPECT_EQ(job.detector.found(0).back().begin, 0);
  EXPECT_EQ(job.detector.found(0).back().end, -1);
}

TEST(RarePausesTest, ARankThatIsSlowAndPausesALittleIsSlow) {
  Job job;
  const auto news = job.Run(
      3000, [](Rank rank, std::int64_t step) { return rank == 0 ? kStep + (step % 100 == 99 ? 10 * kStep : 0) : 0; });
  EXPECT_EQ(news.size(), 1U);
  EXPECT_EQ(job.detector.found(0).back().kind, SlownessKind::kPersistent);
  job.Run(1000, Pauses(0, 100, 10 * kStep));
  EXPECT_EQ(job.detector.found(0).back().kind, SlownessKind::kPauses);
}

TEST(RarePausesTest, PausesThatExplainASlownessAreToldAlone) {
  bool was_slow = false;
  for (const int ranks : {2, 4, 8})
    for (const std::int64_t every : {10, 12, 15, 20, 30}) {
      Job job(ranks);
      job.Run(1000);
      const auto news = job.Run(2000, Pauses(0, every, 2));
      was_slow = was_slow || news[0].slowness.kind == SlownessKind::kRandom;
      ASSERT_EQ(job.detector.found(0).size(), 1U) << ranks << " ranks, every " << every;
      EXPECT_EQ(job.detector.found(0)[0].kind, SlownessKind::kPauses) << ranks << " ranks, every " << every;
    }
  EXPECT_TRUE(was_slow) << "no job shows that such a slowness is forgotten";
}

TEST(RarePausesTest, TwoRanksThatPause) {
  Job job;
  job.Run(6000, [](Rank rank, std::int64_t step) { return rank < 2 && step % 300 == 150 * rank ? 1 : 0; });
  EXPECT_EQ(job.Found(), 2U);
  for (Rank rank = 0; rank < 2; ++rank) {
    ASSERT_EQ(job.detector.found(rank).size(), 1U);
    EXPECT_EQ(job.detector.found(rank)[0].kind, SlownessKind::kPauses);
    EXPECT_EQ(job.detector.found(rank)[0].period, 300);
    EXPECT_EQ(job.detector.found(rank)[0].begin, 150 * rank);
  }
}

TEST(RarePausesTest, ARankThatPausesAfterAnotherOneHasPaused) {
  Job job(2);
  job.Run(5000, Pauses(0, 50, 1));
  job.Run(1000);
  EXPECT_EQ(job.Until(Pauses(1, 50, 1)), 50 * 16);
  EXPECT_EQ(job.detector.found(1).size(), 1U);
}

TEST(RarePausesTest, RanksThatPauseAlikeAccuseNobody) {
  const std::function<Times(std::mt19937&)> kinds[] = {
      [](std::mt19937&) { return [](Rank, std::int64_t step) { return step % 50 == 49 ? 5.0 : 0; }; },
      [](std::mt19937&) { return [](Rank rank, std::int64_t step) { return step % 80 == 10 * rank ? 1.0 : 0; }; },
      [](std::mt19937& random) { return [&](Rank, std::int64_t) { return random() % 100 == 0 ? 4 * kStep : 0; }; },
      [](std::mt19937& random) {
        return [&](Rank, std::int64_t) {
          return random() % 500 == 0 ? kStep * std::pow(1 - std::generate_canonical<double, 32>(random), -1 / 1.2) : 0;
        };
      },
  };
  for (const auto& kind : kinds)
    for (unsigned seed = 1; seed <= 5; ++seed) {
      Job job(8, seed);
      std::mt19937 random(seed);
      job.Run(10'000, kind(random));
      EXPECT_EQ(job.Found(), 0U) << "kind " << &kind - kinds << ", seed " << seed;
    }
}

TEST(RarePausesTest, RanksThatComeAndGo) {
  Job job;
  const Times more = [](Rank rank, std::int64_t step) {
    return rank == 7 && step < 400 ? kNone : rank == 1 && step % 100 > 90 ? kNone : Pauses(0, 50, 1)(rank, step);
  };
  job.Run(1000, more);
  EXPECT_EQ(job.Found(), 1U);
  EXPECT_EQ(job.detector.found(0).back().steps, 20);
  // A rank that has left pauses no more.
  const auto news = job.Run(300, [](Rank rank, std::int64_t) { return rank == 0 ? kNone : 0; });
  ASSERT_EQ(news.size(), 1U);
  EXPECT_EQ(news[0].change, Change::kEnds);
  EXPECT_EQ(news[0].slowness.end, 1000);
  EXPECT_TRUE(std::isfinite(news[0].slowness.lost) && std::isfinite(news[0].slowness.share));
}

TEST(RarePausesTest, ARankThatIsMissingIsNobodysPeer) {
  Job job;
  const Times more = [](Rank rank, std::int64_t step) { return rank == 7 ? kNone : Pauses(0, 50, 1)(rank, step); };
  EXPECT_EQ(job.Until(more), 50 * 7) << "8 ranks need one pause less";
}

TEST(RarePausesTest, StepsThatAreOftenLongAreNoPauses) {
  for (unsigned seed = 1; seed <= 3; ++seed) {
    Job job(8, seed);
    std::mt19937 random(seed);
    job.Run(1500, [&](Rank rank, std::int64_t) { return rank == 2 && random() % 20 == 0 ? 3 * kStep : 0; });
    ASSERT_FALSE(job.detector.found(2).empty()) << "seed " << seed;
    for (const Slowness& found : job.detector.found(2)) EXPECT_EQ(found.kind, SlownessKind::kRandom) << "seed " << seed;
  }
}

TEST(RarePausesTest, BurstsThatAreOverWereNoPauses) {
  Job job;
  job.Run(6000, [](Rank rank, std::int64_t step) {
    for (const std::int64_t begin : {0, 300, 600, 900, 1200, 2000, 2300, 2600})  // one period is longer than the others
      if (rank == 0 && step >= begin && step < begin + 40) return 66 * kStep;
    return 0.0;
  });
  ASSERT_EQ(job.detector.found(0).size(), 1U);
  EXPECT_EQ(job.detector.found(0)[0].kind, SlownessKind::kBursts);
}

TEST(RarePausesTest, StepsOfOneRankAloneDoNotCount) {
  Job job(2);
  for (int i = 0; i < 3000; ++i)
    job.Run(1, [&](Rank rank, std::int64_t) { return rank == 1 ? kNone : i % 50 ? 0 : 5; });
  EXPECT_EQ(job.Found(), 0U);
}

TEST(RarePausesTest, AJobWhoseStepsChangeTenfold) {
  for (const double factor : {0.1, 10.0}) {
    Job job;
    job.Run(1000, Pauses(0, 50, 5));
    job.usual = factor * kStep;
    const auto news = job.Run(5000, Pauses(0, 50, 5));
    EXPECT_TRUE(news.empty()) << "factor " << factor;
    ASSERT_EQ(job.Found(), 1U) << "factor " << factor;
    EXPECT_NEAR(job.detector.found(0)[0].share, 5 / (5 + 50 * kStep * factor), 0.05) << "factor " << factor;
  }
}

}  // namespace
}  // namespace horovod_partial
