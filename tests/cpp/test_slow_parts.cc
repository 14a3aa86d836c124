#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/slowness/slow_parts.h"

namespace horovod_partial {
namespace {

const Parts kUsual{{0.010, 0.020, 0.040, 0.020, 0.010}};

// The parts of a step in which one part takes longer.
Parts Longer(Part part, double seconds) {
  Parts parts = kUsual;
  parts[part] += seconds;
  return parts;
}

// Ranks that take equal steps.
struct Ranks {
  explicit Ranks(std::vector<Parts> of) : slow(static_cast<int>(of.size())), parts(std::move(of)) {}

  std::string Run(Rank rank, int steps = 20) {
    for (int step = 0; step < steps; ++step) slow.Step(parts);
    return slow.CauseOf(rank).part;
  }

  SlowParts slow;
  std::vector<Parts> parts;
};

TEST(SlowPartsTest, ThePartWithTheExcessExplainsIt) {
  for (const Part part : {Part::kLoader, Part::kForward, Part::kBackward, Part::kOptimizer, Part::kOther}) {
    Ranks ranks({kUsual, Longer(part, 0.050), kUsual, kUsual});
    EXPECT_EQ(ranks.Run(1), std::string(NameOf(part)));
    EXPECT_EQ(ranks.Run(0), "none") << "it is not slow";
  }
}

TEST(SlowPartsTest, TwoRanksAreEnough) {
  Ranks ranks({kUsual, Longer(Part::kLoader, 0.050)});
  EXPECT_EQ(ranks.Run(1), "loader");
}

TEST(SlowPartsTest, ASlowProcessorSlowsBothPasses) {
  Parts slow = kUsual;
  for (double& one : slow.seconds) one *= 2;
  Ranks ranks({kUsual, kUsual, slow});
  EXPECT_EQ(ranks.Run(2), "compute");
  EXPECT_EQ(ranks.slow.CauseOf(2).text, ": 60 % of the excess is the forward and backward passes");
}

TEST(SlowPartsTest, NoPartIsNamedThatHasLessThanHalf) {
  Parts slow = kUsual;
  for (const Part part : {Part::kLoader, Part::kForward, Part::kOptimizer}) slow[part] += 0.030;
  Ranks ranks({kUsual, kUsual, slow});
  EXPECT_EQ(ranks.Run(2), "none");
  EXPECT_EQ(ranks.slow.CauseOf(2).text, "");
}

TEST(SlowPartsTest, PassesThatCannotBeToldApartAreOne) {
  Parts usual{{0.010, -1, 0.060, 0.020, 0.010}}, slow = usual;
  slow[Part::kBackward] += 0.050;
  Ranks ranks({usual, usual, slow});
  EXPECT_EQ(ranks.Run(2), "compute");
  ranks = Ranks({kUsual, kUsual, slow});  // as the others, but for the passes
  EXPECT_EQ(ranks.Run(2), "compute");
}

TEST(SlowPartsTest, RecentStepsCountMore) {
  Ranks ranks({kUsual, kUsual, Longer(Part::kLoader, 0.050)});
  EXPECT_EQ(ranks.Run(2, 100), "loader");
  ranks.parts[2] = Longer(Part::kOther, 0.050);
  EXPECT_EQ(ranks.Run(2, 100), "other");
}

TEST(SlowPartsTest, StepsThatAreAsLongAsTheOthersSayNothing) {
  Ranks ranks({kUsual, kUsual, Longer(Part::kLoader, 0.050)});
  EXPECT_EQ(ranks.Run(2, 1), "loader");
  ranks.parts[2] = kUsual;
  std::swap(ranks.parts[2][Part::kOther], ranks.parts[2][Part::kBackward]);
  EXPECT_EQ(ranks.Run(2, 1000), "loader");
  EXPECT_EQ(ranks.slow.CauseOf(2).text, ": 100 % of the excess is waiting for data");
}

TEST(SlowPartsTest, NothingIsSaidOfUnknownParts) {
  Ranks ranks({kUsual, Parts(), kUsual});
  EXPECT_EQ(ranks.Run(1), "none");
  Ranks alone({Parts(), Longer(Part::kLoader, 0.050), Parts()});
  EXPECT_EQ(alone.Run(1), "none") << "there is nothing to compare it with";
  EXPECT_THROW(alone.slow.Step({kUsual, kUsual}), std::out_of_range);
}

}  // namespace
}  // namespace horovod_partial
