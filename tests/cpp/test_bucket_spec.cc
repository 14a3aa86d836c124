#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "core/rounds/bucket_spec.h"
#include "core/values/bytes.h"
#include "harness/others.h"

namespace horovod_partial {
namespace {

using test::Others;
using testing::HasSubstr;
using testing::SizeIs;
using testing::ThrowsMessage;

// Every field has a value at the end of its range.
BucketSpec FullSpec() {
  BucketSpec spec;
  spec.missed = Missed::kLatest;
  spec.late = Late::kDiscard;
  spec.divisor = Divisor::kContributors;
  spec.weights = Weights::kStaleness;
  spec.weight_parameter = std::numeric_limits<double>::denorm_min();
  spec.drop_nonfinite = true;
  spec.replay_limit = std::numeric_limits<int>::max();
  spec.policy.rule = Policy::Rule::kReady;
  spec.policy.quorum = std::numeric_limits<int>::max();
  spec.policy.seed = std::numeric_limits<std::uint64_t>::max();
  spec.policy.max_staleness = std::numeric_limits<Round>::max();
  spec.policy.grace = Time::min();
  spec.policy.schedule = {Schedule::Kind::kTable, 7, {{0, 0, 1}, {}, {2147483647, kNoGroup}}};
  spec.policy.period = Round{1} << 40;
  spec.policy.group_size = -1;
  spec.policy.window = 5;
  spec.policy.description = std::string("a text with \0 and \xff in it", 24);
  spec.prescale_factor = -0.1;
  spec.postscale_factor = std::numeric_limits<double>::infinity();
  spec.members = {"1.weight (3, 4)", ""};
  return spec;
}

TEST(BucketSpecTest, SurvivesTheJourneyWhateverAFieldHolds) {
  for (const BucketSpec& made : {BucketSpec{}, FullSpec()}) {
    EXPECT_TRUE(DecodeBucketSpec(Encode(made)) == made);
    const std::vector<BucketSpec> others = Others(made);
    EXPECT_GE(others.size(), 20u);  // fields, with those of the policy and of its schedule
    for (const BucketSpec& other : others) {
      EXPECT_FALSE(other == made) << &other - others.data();
      EXPECT_TRUE(DecodeBucketSpec(Encode(other)) == other) << &other - others.data();
    }
  }
}

TEST(BucketSpecTest, EveryTruncationThrows) {
  const std::string bytes = Encode(FullSpec());
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(DecodeBucketSpec(bytes.substr(0, size)), std::runtime_error)
        << size << " of " << bytes.size() << " bytes";
}

TEST(BucketSpecTest, TrailingBytesThrow) {
  EXPECT_THAT([] { DecodeBucketSpec(Encode(FullSpec()) + '\0'); },
              ThrowsMessage<std::runtime_error>("the specification of a bucket has trailing bytes"));
}

TEST(BucketSpecTest, AnotherVersionIsNamed) {
  std::string bytes = Encode(FullSpec());
  bytes[0] = static_cast<char>(bytes[0] + 1);
  EXPECT_THAT([&] { DecodeBucketSpec(bytes); }, ThrowsMessage<std::runtime_error>(HasSubstr("of another version")));
}

// Nothing but an exception may come of bytes that are wrong: no value that does not exist, and no end of the memory.
TEST(BucketSpecTest, EveryDamagedByteThrowsOrGivesASpecification) {
  const std::string bytes = Encode(FullSpec());
  int refused = 0;
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x7f);
    try {
      EXPECT_EQ(Encode(DecodeBucketSpec(damaged)), damaged) << "byte " << at;
    } catch (const std::runtime_error&) {
      ++refused;
    }
  }
  EXPECT_GE(refused, 4 + 5 + 2);  // the version, enumerations and truth values; lengths too
}

// --- Names

TEST(NamesTest, ThereAndBack) {
  EXPECT_EQ(FromName<Late>("late", "keep"), Late::kKeep);
  EXPECT_EQ(FromName<Divisor>("divisor", "contributors"), Divisor::kContributors);
  EXPECT_EQ(FromName<Weights>("weights", "staleness"), Weights::kStaleness);
  EXPECT_EQ(FromName<Missed>("missed", "replay"), Missed::kReplay);
  EXPECT_EQ(FromNumber<Missed>(2), Missed::kLatest);
}

TEST(NamesTest, OthersThrow) {
  EXPECT_THAT([] { FromName<Missed>("missed", "all"); },
              ThrowsMessage<std::invalid_argument>("missed must be 'sum', 'replay' or 'latest', not 'all'"));
  EXPECT_THAT([] { FromName<Divisor>("divisor", ""); },
              ThrowsMessage<std::invalid_argument>("divisor must be 'none' or 'contributors', not ''"));
  EXPECT_THROW(FromNumber<Missed>(3), std::runtime_error);
}

// --- The number of a format

enum class Color : std::uint8_t { kRed, kBlue };
constexpr auto NamesOf(Color /*type*/) { return std::array{"red", "blue"}; }
enum class Colour : std::uint8_t { kRed, kBlue };
constexpr auto NamesOf(Colour /*type*/) { return std::array{"red", "green"}; }

template <class First, class Second, int kind = 0>
struct Pair {
  First first{};
  Second second{};

  template <class Self>
  static auto Fields(Self& self) {
    if constexpr (kind == 0) return std::make_tuple(Named("first", self.first), Named("second", self.second));
    if constexpr (kind == 1) return std::make_tuple(Named("second", self.second), Named("first", self.first));
    if constexpr (kind == 2) return std::make_tuple(Named("first", self.first), Named("third", self.second));
    if constexpr (kind == 3) return std::make_tuple(Named("first", self.first));
  }
};

TEST(FormatTest, DiffersWhereNamesOrTypesDo) {
  const auto plain = Format::Of<Pair<int, double>>();
  const auto same = Format::Of<Pair<int, double>>();
  EXPECT_EQ(plain, same);
  const std::set<std::uint32_t> numbers = {
      plain,
      Format::Of<Pair<int, double, 1>>(),
      Format::Of<Pair<int, double, 2>>(),
      Format::Of<Pair<int, double, 3>>(),
      Format::Of<Pair<double, int>>(),
      Format::Of<Pair<int, float>>(),
      Format::Of<Pair<int, std::int64_t>>(),
      Format::Of<Pair<int, std::string>>(),
      Format::Of<Pair<int, std::vector<double>>>(),
      Format::Of<Pair<int, Pair<int, double>>>(),
      Format::Of<Pair<int, Color>>(),
      Format::Of<Pair<int, Colour>>(),
  };
  EXPECT_THAT(numbers, SizeIs(12));
}

}  // namespace
}  // namespace horovod_partial
