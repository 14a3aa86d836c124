#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "engine/farewell.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;

TEST(FarewellTest, WhatIsSaidIsTakenOnceAndSetsTheSpeakerFree) {
  Farewell farewell;
  farewell.Say("out of memory");
  std::thread background([&] { EXPECT_EQ(farewell.TakeUnsaid(), "out of memory"); });
  farewell.AwaitSaid(60s);
  background.join();
  EXPECT_EQ(farewell.TakeUnsaid(), "");
}

TEST(FarewellTest, NobodyWaitsForLongWhereNoReportIsMade) {
  Farewell farewell;
  farewell.Say("out of memory");
  farewell.AwaitSaid(10ms);
  EXPECT_EQ(farewell.TakeUnsaid(), "out of memory");
}

TEST(FirstFailureTest, ExplainsTheEndUntilTheNextBeginning) {
  FirstFailure failure;
  EXPECT_EQ(failure.Explain("It is over"), "It is over");
  failure.Hear("rank 2 has failed: no memory");
  failure.Hear("rank 1 has failed: rank 2 is gone");
  EXPECT_EQ(failure.Explain("It is over"), "rank 2 has failed: no memory. It is over");
  failure.Forget();
  EXPECT_EQ(failure.Explain("It is over"), "It is over");
}

}  // namespace
}  // namespace horovod_partial
