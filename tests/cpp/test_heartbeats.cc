#include <gtest/gtest.h>

#include <array>
#include <stdexcept>

#include "core/watch/heartbeats.h"

namespace horovod_partial {
namespace {

TEST(HeartbeatsTest, SilenceIsCountedSinceARankWasHeard) {
  Heartbeats heartbeats(10);
  EXPECT_EQ(heartbeats.Silence(1), 0);
  heartbeats.Heard(1);
  heartbeats.Pass();
  heartbeats.Pass();
  EXPECT_EQ(heartbeats.Silence(1), 2);
  heartbeats.Heard(1);
  EXPECT_EQ(heartbeats.Silence(1), 0);
}

TEST(HeartbeatsTest, OnlyRanksThatWereHeardOnceAreWatched) {
  Heartbeats heartbeats(1);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(heartbeats.Pass(), std::nullopt);
}

TEST(HeartbeatsTest, ARankThatHasEndedIsNotMissing) {
  Heartbeats heartbeats(1);
  heartbeats.Heard(1);
  heartbeats.Gone(1);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(heartbeats.Pass(), std::nullopt);
}

// Every way in which three ranks can run and be stopped for some units of time. In a unit a rank that runs hears what
// was sent before, says that it lives, and lets an interval pass, as the monitor does. Rank 0 watches the others, and
// tells them; they watch rank 0.
class Model {
 public:
  static constexpr int kRanks = 3, kLimit = 2, kUnits = 7;

  // Bit kRanks * unit + rank says whether the rank runs in that unit.
  explicit Model(unsigned runs) : runs_(runs) {
    for (Rank rank = 1; rank < kRanks; ++rank) {
      watch_[0].Heard(rank);
      watch_[rank].Heard(0);
    }
    for (int unit = 0; unit < kUnits; ++unit) Unit(unit);
  }

 private:
  bool Runs(Rank rank, int unit) const { return (runs_ >> (kRanks * unit + rank) & 1) != 0; }

  void Unit(int unit) {
    std::array<bool, kRanks> says{};
    bool tells = false;
    for (Rank rank = 0; rank < kRanks; ++rank) {
      if (ended_[rank] || !Runs(rank, unit)) continue;
      const bool told = rank != 0 && told_;
      for (Rank other = 0; other < kRanks; ++other)
        if (other != rank && (rank == 0 || other == 0) && inbox_[rank][other]) watch_[rank].Heard(other);
      inbox_[rank] = {};
      if (told) {
        ended_[rank] = true;
        continue;
      }
      says[rank] = true;
      const auto missing = watch_[rank].Pass();
      Judge(rank, unit, missing);
      if (!missing) continue;
      ended_[rank] = true;
      tells = tells || rank == 0;
    }
    told_ = told_ || tells;
    for (Rank rank = 0; rank < kRanks; ++rank)
      for (Rank other = 0; other < kRanks; ++other) inbox_[other][rank] = inbox_[other][rank] || says[rank];
  }

  // Who is accused has not run, and has not ended, in the last intervals of the accuser; and who has not run for one
  // more is accused.
  void Judge(Rank rank, int unit, std::optional<Rank> missing) {
    for (Rank other = 0; other < kRanks; ++other) {
      if (other == rank || (rank != 0 && other != 0)) continue;
      // Intervals of `rank` since it has heard `other`; in a unit it hears first.
      int silent = 0;
      for (int at = unit; at >= 0; --at) {
        if (!Runs(rank, at)) continue;
        const int before = Before(rank, at);
        bool spoke = false;
        for (int sent = before; sent < at; ++sent) spoke = spoke || spoken_.at(sent)[other];
        ++silent;
        if (spoke) break;
      }
      EXPECT_TRUE(missing != other || silent > kLimit) << runs_ << " unit " << unit << " rank " << rank;
      EXPECT_TRUE(missing || silent <= kLimit) << runs_ << " unit " << unit << " rank " << rank;
    }
    spoken_.at(unit)[rank] = true;
  }

  // The unit in which a rank ran before this one; what was sent from there on is new to it.
  int Before(Rank rank, int unit) const {
    for (int at = unit - 1; at >= 0; --at)
      if (Runs(rank, at)) return at;
    return 0;
  }

  unsigned runs_;
  std::array<Heartbeats, kRanks> watch_{Heartbeats(kLimit), Heartbeats(kLimit), Heartbeats(kLimit)};
  std::array<std::array<bool, kRanks>, kRanks> inbox_{};  // by receiver and sender
  std::array<std::array<bool, kRanks>, kUnits> spoken_{};
  std::array<bool, kRanks> ended_{};
  bool told_ = false;
};

TEST(HeartbeatsTest, NobodyWhoRunsIsAccusedAndWhoIsStoppedIs) {
  for (unsigned runs = 0; runs < 1U << (Model::kRanks * Model::kUnits); ++runs) {
    Model model(runs);
    if (HasFailure()) return;
  }
}

TEST(HelloTest, IsReadAsItWasWrittenAndOthersAreRefused) {
  const std::string secret = "0123456789abcdef";
  const std::string bytes = Hello{secret, 3}.Encode();
  ASSERT_EQ(bytes.size(), Hello::kBytes);
  ASSERT_TRUE(Hello::Decode(bytes, secret, 4));
  EXPECT_EQ(Hello::Decode(bytes, secret, 4)->rank, 3);
  EXPECT_FALSE(Hello::Decode(bytes, secret, 3)) << "no such rank";
  EXPECT_FALSE(Hello::Decode(Hello{secret, 0}.Encode(), secret, 4)) << "rank 0 is who listens";
  EXPECT_FALSE(Hello::Decode(Hello{secret, -1}.Encode(), secret, 4));
  EXPECT_FALSE(Hello::Decode(bytes, "another secret!!", 4));
  EXPECT_FALSE(Hello::Decode(bytes.substr(1), secret, 4));
  EXPECT_FALSE(Hello::Decode(bytes + "x", secret, 4));
  EXPECT_FALSE(Hello::Decode("", secret, 4));
}

TEST(EndpointTest, IsReadAsItWasWritten) {
  const Endpoint endpoint{4711, "secret", {"10.0.0.1", "fe80::1"}};
  const Endpoint read = Endpoint::Decode(endpoint.Encode());
  EXPECT_EQ(read.port, endpoint.port);
  EXPECT_EQ(read.secret, endpoint.secret);
  EXPECT_EQ(read.addresses, endpoint.addresses);
}

}  // namespace
}  // namespace horovod_partial
