#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "core/values/dtype.h"

namespace horovod_partial {
namespace {

using testing::ElementsAre;

template <class T>
constexpr DataType TypeOf() {
  if (std::is_same_v<T, float>) return DataType::kFloat32;
  if (std::is_same_v<T, double>) return DataType::kFloat64;
  return sizeof(T) == 4 ? DataType::kInt32 : DataType::kInt64;
}

// --- Every type that is a number of C++

template <class T>
class NumberTest : public testing::Test {};
using Numbers = testing::Types<std::int32_t, std::int64_t, float, double>;
TYPED_TEST_SUITE(NumberTest, Numbers);

TYPED_TEST(NumberTest, SizeIsThatOfTheType) { EXPECT_EQ(SizeOf(TypeOf<TypeParam>()), sizeof(TypeParam)); }

TYPED_TEST(NumberTest, AddsElementByElementAndNoFurtherThanTold) {
  std::vector<TypeParam> target = {1, 2, 3, 100};
  const std::vector<TypeParam> source = {10, 20, 30, 1};
  Add(TypeOf<TypeParam>(), target.data(), source.data(), 3);
  EXPECT_THAT(target, ElementsAre(TypeParam{11}, TypeParam{22}, TypeParam{33}, TypeParam{100}));
  EXPECT_THAT(source, ElementsAre(TypeParam{10}, TypeParam{20}, TypeParam{30}, TypeParam{1}));
}

TYPED_TEST(NumberTest, ScalesAndTruncatesIntegers) {
  std::vector<TypeParam> data = {8, 9, 100};
  Scale(TypeOf<TypeParam>(), data.data(), data.size(), 0.25);
  const auto quarter = [](int value) { return static_cast<TypeParam>(static_cast<double>(value) * 0.25); };
  EXPECT_THAT(data, ElementsAre(quarter(8), quarter(9), quarter(100)));
}

TYPED_TEST(NumberTest, OrdinaryValuesAreFinite) {
  const std::vector<TypeParam> data = {std::numeric_limits<TypeParam>::lowest(), 0,
                                       std::numeric_limits<TypeParam>::max()};
  EXPECT_TRUE(AllFinite(TypeOf<TypeParam>(), data.data(), data.size()));
  EXPECT_TRUE(AllFinite(TypeOf<TypeParam>(), data.data(), 0));
}

// --- Floating point

template <class T>
class FloatingPointTest : public testing::Test {};
using FloatingPoint = testing::Types<float, double>;
TYPED_TEST_SUITE(FloatingPointTest, FloatingPoint);

TYPED_TEST(FloatingPointTest, FindsOneBadElementAnywhere) {
  using Limits = std::numeric_limits<TypeParam>;
  for (const TypeParam bad : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
    for (std::size_t at = 0; at < 17; ++at) {
      std::vector<TypeParam> data(17, TypeParam{1});
      data[at] = bad;
      EXPECT_FALSE(AllFinite(TypeOf<TypeParam>(), data.data(), data.size())) << bad << " at " << at;
      EXPECT_TRUE(AllFinite(TypeOf<TypeParam>(), data.data(), at));
    }
  }
}

TYPED_TEST(FloatingPointTest, NegativeZeroAndDenormalsAreFinite) {
  const std::vector<TypeParam> data = {-TypeParam{0}, std::numeric_limits<TypeParam>::denorm_min()};
  EXPECT_TRUE(AllFinite(TypeOf<TypeParam>(), data.data(), data.size()));
}

// --- Half precision, against an independent reference

constexpr std::uint16_t kHalfInfinity = 0x7c00;

double HalfToDouble(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const int mantissa = bits & 0x3ff;
  double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 0x1f) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// The nearest half by search among all of them; ties go to the even one. `value` is finite.
std::uint16_t DoubleToHalf(double value) {
  static const std::vector<double> magnitudes = [] {
    std::vector<double> all;
    for (unsigned bits = 0; bits < kHalfInfinity; ++bits) all.push_back(HalfToDouble(static_cast<std::uint16_t>(bits)));
    all.push_back(65536.0);  // where infinity stands in for the next value
    return all;
  }();
  const double magnitude = std::fabs(value);
  auto above = std::lower_bound(magnitudes.begin(), magnitudes.end(), magnitude);
  if (above == magnitudes.end()) --above;
  auto index = above - magnitudes.begin();
  if (index > 0 && *above != magnitude) {
    const double up = *above - magnitude;
    const double down = magnitude - *(above - 1);
    if (down < up || (down == up && index % 2 != 0)) --index;
  }
  return static_cast<std::uint16_t>(index | (std::signbit(value) ? 0x8000 : 0));
}

std::uint16_t AddHalves(std::uint16_t a, std::uint16_t b) {
  Add(DataType::kFloat16, &a, &b, 1);
  return a;
}

TEST(HalfTest, EveryFiniteValueSurvivesAddingZero) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if ((half & kHalfInfinity) == kHalfInfinity) continue;
    const std::uint16_t expected = half == 0x8000 ? std::uint16_t{0} : half;  // -0 + 0 is 0
    ASSERT_EQ(AddHalves(half, 0), expected) << std::hex << bits;
  }
}

TEST(HalfTest, SumsAreRoundedToNearestEven) {
  std::mt19937 random(1);
  std::uniform_int_distribution<unsigned> any(0, 0xffff);
  for (int i = 0; i < 20000; ++i) {
    const auto a = static_cast<std::uint16_t>(any(random));
    const auto b = static_cast<std::uint16_t>(any(random));
    if ((a & kHalfInfinity) == kHalfInfinity || (b & kHalfInfinity) == kHalfInfinity) continue;
    ASSERT_EQ(AddHalves(a, b), DoubleToHalf(HalfToDouble(a) + HalfToDouble(b))) << std::hex << a << " + " << b;
  }
}

TEST(HalfTest, RoundingAtTheEdges) {
  struct {
    std::uint16_t a, b, sum;
    const char* why;
  } const cases[] = {
      {0x0001, 0x0001, 0x0002, "subnormals add up"},
      {0x03ff, 0x0001, 0x0400, "the largest subnormal and one more is normal"},
      {0x7bff, 0x4bff, 0x7bff, "65504 + 15.99 is still nearer to 65504"},
      {0x7bff, 0x4c00, 0x7c00, "65504 + 16 is a tie with 65536: to even, which is infinity"},
      {0x6800, 0x3c00, 0x6800, "2048 + 1 is a tie: to even, down"},
      {0x6801, 0x3c00, 0x6802, "2050 + 1 is a tie: to even, up"},
      {0x7c00, 0x3c00, 0x7c00, "infinity stays"},
      {0xfc00, 0x3c00, 0xfc00, "so does the negative one"},
  };
  for (const auto& c : cases) EXPECT_EQ(AddHalves(c.a, c.b), c.sum) << c.why;
  EXPECT_EQ(AddHalves(0x7c00, 0xfc00) & 0x7fff, 0x7e00) << "infinity minus infinity is not a number";
}

TEST(HalfTest, Scales) {
  std::uint16_t data[] = {0x4400, 0xc000, 0x0002};  // 4, -2, 2^-23
  Scale(DataType::kFloat16, data, 3, 0.5);
  EXPECT_THAT(data, ElementsAre(0x4000, 0xbc00, 0x0001));
}

TEST(HalfTest, FindsWhatIsNotFinite) {
  const std::uint16_t finite[] = {0x0000, 0x8001, 0x7bff, 0xfbff};
  EXPECT_TRUE(AllFinite(DataType::kFloat16, finite, 4));
  for (const auto bad : std::vector<std::uint16_t>{0x7c00, 0xfc00, 0x7e00, 0x7c01}) {
    const std::uint16_t data[] = {0x3c00, bad};
    EXPECT_FALSE(AllFinite(DataType::kFloat16, data, 2)) << std::hex << bad;
  }
}

// --- Names, and a type that does not exist

TEST(DataTypeTest, NamesAreThoseOfNumPy) {
  EXPECT_STREQ(NameOf(DataType::kInt32), "int32");
  EXPECT_STREQ(NameOf(DataType::kInt64), "int64");
  EXPECT_STREQ(NameOf(DataType::kFloat16), "float16");
  EXPECT_STREQ(NameOf(DataType::kFloat32), "float32");
  EXPECT_STREQ(NameOf(DataType::kFloat64), "float64");
  EXPECT_EQ(SizeOf(DataType::kFloat16), 2u);
}

TEST(DataTypeTest, UnknownTypesThrow) {
  const auto unknown = static_cast<DataType>(42);
  EXPECT_THROW(SizeOf(unknown), std::invalid_argument);
  EXPECT_THROW(Add(unknown, nullptr, nullptr, 0), std::invalid_argument);
  EXPECT_THROW(AllFinite(unknown, nullptr, 0), std::invalid_argument);
}

}  // namespace
}  // namespace horovod_partial
