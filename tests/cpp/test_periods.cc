#include <gtest/gtest.h>

#include "core/groups/weights.h"

namespace horovod_partial {
namespace {

TEST(PeriodsTest, TheFirstStepSignalsBeforeThePeriodBegins) {
  Periods periods(3);
  periods.TakeStep();
  EXPECT_TRUE(periods.MustSignal(0));
  EXPECT_FALSE(periods.MustSignal(1));
  EXPECT_FALSE(periods.IsOver(1));
}

TEST(PeriodsTest, TheFastestRankSignalsUntilItsPeriodIsOver) {
  Periods periods(2);
  periods.TakeStep();
  EXPECT_FALSE(periods.MustSignal(1));
  periods.TakeStep();
  EXPECT_TRUE(periods.MustSignal(1));
  EXPECT_FALSE(periods.IsOver(1));
  EXPECT_FALSE(periods.MustSignal(2));
  EXPECT_TRUE(periods.IsOver(2));
  EXPECT_EQ(periods.BeginNext(), 2);
  periods.TakeStep();
  EXPECT_FALSE(periods.MustSignal(2));
  EXPECT_FALSE(periods.IsOver(2));
}

TEST(PeriodsTest, ASlowRankStopsWhenAnotherHasSignalled) {
  Periods periods(100);
  periods.TakeStep();
  EXPECT_FALSE(periods.MustSignal(2));
  EXPECT_TRUE(periods.IsOver(2));
  EXPECT_EQ(periods.BeginNext(), 1);
  EXPECT_FALSE(periods.IsOver(2));
}

TEST(PeriodsTest, WorkIsComparableWhereAPeriodIsOverForSomeOnly) {
  Periods fast(4), slow(4);
  for (int step = 0; step < 4; ++step) fast.TakeStep();
  slow.TakeStep();
  EXPECT_EQ(fast.BeginNext(), 4);
  fast.TakeStep();
  EXPECT_EQ(fast.Work() - slow.Work(), 5 - 1);
}

TEST(PeriodsTest, BeginsAnewWhereverTheSignalIs) {
  Periods fast(4), slow(4);
  for (int step = 0; step < 4; ++step) fast.TakeStep();
  fast.BeginNext();
  slow.TakeStep();
  for (Periods* periods : {&fast, &slow}) {
    periods->BeginAnew(3);
    EXPECT_FALSE(periods->IsOver(3));
    EXPECT_TRUE(periods->IsOver(4));
    EXPECT_EQ(periods->Work(), 8);
  }
}

TEST(PeriodsTest, BeginsAnewBeforeTheFirstStep) {
  Periods periods(4);
  periods.BeginAnew(0);
  EXPECT_EQ(periods.Work(), 0);
  EXPECT_TRUE(periods.MustSignal(0));
  EXPECT_FALSE(periods.IsOver(1));
}

}  // namespace
}  // namespace horovod_partial
