#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <stdexcept>

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

double Sum(const Parts& parts) {
  double sum = 0;
  for (const double one : parts.seconds) sum += std::max(one, 0.0);
  return sum;
}

// Ranks that take equal steps.
struct Ranks {
  explicit Ranks(std::vector<Parts> of) : slow(static_cast<int>(of.size())), parts(std::move(of)) {}

  std::string Run(Rank rank, int steps = 20) {
    std::vector<double> seconds;
    for (const Parts& one : parts) seconds.push_back(one.known() ? Sum(one) : 0.1);
    for (int step = 0; step < steps; ++step) slow.Step(seconds, parts);
    const auto cause = slow.CauseOf(rank);
    return cause ? NameOf(cause->part) : "none";
  }

  SlowParts slow;
  std::vector<Parts> parts;
};

TEST(SlowPartsTest, ThePartWithTheExcessExplainsIt) {
  for (const Part part : {Part::kLoader, Part::kForward, Part::kBackward, Part::kOptimizer, Part::kOther}) {
    Ranks ranks({kUsual, Longer(part, 0.050), kUsual, kUsual});
    EXPECT_EQ(ranks.Run(1), NameOf(part));
    EXPECT_EQ(ranks.Run(0), std::string("none")) << "it is not slow";
  }
}

TEST(SlowPartsTest, TwoRanksAreEnough) {
  Ranks ranks({kUsual, Longer(Part::kLoader, 0.050)});
  EXPECT_EQ(ranks.Run(1), std::string("loader"));
}

TEST(SlowPartsTest, ASlowProcessorSlowsBothPasses) {
  Parts slow = kUsual;
  for (double& one : slow.seconds) one *= 2;
  Ranks ranks({kUsual, kUsual, slow});
  EXPECT_EQ(ranks.Run(2), std::string("compute"));
  EXPECT_EQ(ranks.slow.Describe(2), ": 60 % of the excess is the forward and backward passes");
}

TEST(SlowPartsTest, NoPartIsNamedThatHasLessThanHalf) {
  Parts slow = kUsual;
  for (const Part part : {Part::kLoader, Part::kForward, Part::kOptimizer}) slow[part] += 0.030;
  Ranks ranks({kUsual, kUsual, slow});
  EXPECT_EQ(ranks.Run(2), std::string("none"));
  EXPECT_EQ(ranks.slow.Describe(2), "");
}

TEST(SlowPartsTest, PassesThatCannotBeToldApartAreOne) {
  Parts usual{{0.010, -1, 0.060, 0.020, 0.010}}, slow = usual;
  slow[Part::kBackward] += 0.050;
  Ranks ranks({usual, usual, slow});
  EXPECT_EQ(ranks.Run(2), std::string("compute"));
  ranks = Ranks({kUsual, kUsual, slow});  // as the others, but for the passes
  EXPECT_EQ(ranks.Run(2), std::string("compute"));
}

TEST(SlowPartsTest, RecentStepsCountMore) {
  Ranks ranks({kUsual, kUsual, Longer(Part::kLoader, 0.050)});
  EXPECT_EQ(ranks.Run(2, 100), std::string("loader"));
  ranks.parts[2] = Longer(Part::kOther, 0.050);
  EXPECT_EQ(ranks.Run(2, 100), std::string("other"));
}

TEST(SlowPartsTest, StepsThatAreAsLongAsTheOthersSayNothing) {
  Ranks ranks({kUsual, kUsual, Longer(Part::kLoader, 0.050)});
  EXPECT_EQ(ranks.Run(2, 1), std::string("loader"));
  ranks.parts[2] = kUsual;
  std::swap(ranks.parts[2][Part::kLoader], ranks.parts[2][Part::kBackward]);
  EXPECT_EQ(ranks.Run(2, 1000), std::string("loader"));
  EXPECT_EQ(ranks.slow.Describe(2), ": 100 % of the excess is waiting for data");
}

TEST(SlowPartsTest, NothingIsSaidOfUnknownParts) {
  Ranks ranks({kUsual, Parts(), kUsual});
  EXPECT_EQ(ranks.Run(1), std::string("none"));
  Ranks alone({Parts(), Longer(Part::kLoader, 0.050), Parts()});
  EXPECT_EQ(alone.Run(1), std::string("none")) << "there is nothing to compare it with";
  ranks = Ranks({kUsual, Longer(Part::kLoader, 0.050), kUsual});
  const double none = std::numeric_limits<double>::quiet_NaN();
  ranks.slow.Step({0.1, none, 0.1}, ranks.parts);
  EXPECT_FALSE(ranks.slow.CauseOf(1));
  EXPECT_THROW(ranks.slow.Step({0.1, 0.1}, ranks.parts), std::invalid_argument);
}

TEST(PartsTest, ASumLeavesOutWhatIsUnknown) {
  Parts sum;
  sum.Add(Parts());
  EXPECT_FALSE(sum.known());
  sum.Add({{1, -1, 3, 4, 5}});
  sum.Add({{1, 2, 3, -1, 5}});
  EXPECT_EQ(sum, (Parts{{2, 2, 6, 4, 10}}));
}

}  // namespace
}  // namespace horovod_partial
