#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/rounds/message.h"
#include "core/values/bytes.h"
#include "harness/others.h"

namespace horovod_partial {
namespace {

using testing::ElementsAre;

// Everything that a report can hold, with values at the ends of their ranges.
Report FullReport() {
  Report report;
  report.absent.all = true;
  report.waiting.names = {"", "gradients.0", std::string("\0\n", 2)};
  report.blocked = true;
  report.elsewhere = "in a flush";
  report.flush = Report::Flush::kEnding;
  Report::Item declaring;
  declaring.bucket = "gradients.0";
  declaring.gradients = 3;
  declaring.full = true;
  declaring.work = 2147483647;
  declaring.declaration =
      Declaration{{}, DataType::kFloat64, {0, std::int64_t{1} << 40}, 7, 0.1, std::numeric_limits<double>::infinity()};
  Policy& policy = declaring.declaration->policy;
  policy.rule = Policy::Rule::kInitiator;
  policy.quorum = 2147483647;
  policy.seed = ~std::uint64_t{0};
  policy.max_staleness = Round{1} << 40;
  policy.grace = Policy::kAutomaticGrace;
  policy.schedule = {Schedule::Kind::kTable, 7, {{0, 0, 1}, {}, {2147483647, kNoGroup}}};
  policy.period = Round{1} << 40;
  policy.group_size = 2147483647;
  policy.window = 5;
  policy.description = "Majority(initiator='random')";
  Report::Item pending;
  pending.kind = Report::Item::Kind::kPending;
  pending.bucket = std::string("a name with \0 and \n in it", 25);
  pending.gradients = 1 << 30;
  pending.late = 3;
  pending.age = std::chrono::hours(1);
  report.items = {declaring, pending, Report::Item{}};
  report.failure = "RuntimeError: no memory";
  return report;
}

Closing FullClosing() {
  Closing closing;
  closing.round = (Round{1} << 40) + 5;
  closing.reason = Closing::Reason::kLiveness;
  closing.flushes = true;
  closing.flush_over = Report::Flush::kEnding;
  closing.contributions = {{3, true}, {0, true, false, 9}, {2, false, true}, {0, false}, {(1 << 30) - 1, true}};
  closing.groups = {0, 1, 0, kNoGroup, 1};
  closing.upcoming = {{0, 0, 0, 0, 0}, {4, 3, 2, 1, 0}};
  return closing;
}

// --- Reports

Report Decoded(const std::string& bytes) { return FromBytes<Report>(bytes, "a report"); }

TEST(ReportTest, SurvivesTheJourney) {
  for (const Report& report : {FullReport(), Report{}}) EXPECT_TRUE(Decoded(BytesOf(report)) == report);
}

TEST(ReportTest, EveryFieldIsComparedAndEncoded) {
  EXPECT_TRUE(Report{}.empty());
  std::vector<Report> others = test::Others(Report{});
  EXPECT_EQ(others.size(), 11u);  // two for a set of buckets, and for an enumeration of three
  const auto items = test::Others(Report::Item{});
  EXPECT_EQ(items.size(), 13u);
  for (const Report::Item& item : items) others.emplace_back().items = {item};
  for (const Report& other : others) {
    EXPECT_FALSE(other.empty()) << &other - others.data();
    EXPECT_TRUE(Decoded(BytesOf(other)) == other) << &other - others.data();
  }
}

TEST(ReportTest, EveryTruncationThrows) {
  const std::string bytes = BytesOf(FullReport());
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(Decoded(bytes.substr(0, size)), std::runtime_error) << size << " of " << bytes.size() << " bytes";
}

TEST(ReportTest, TrailingBytesThrow) { EXPECT_THROW(Decoded(BytesOf(FullReport()) + '\0'), std::runtime_error); }

TEST(ReportTest, ABucketNameOfImpossibleLengthThrows) {
  Report report;
  report.items.emplace_back();
  report.items[0].bucket = "name";
  std::string bytes = BytesOf(report);
  const std::size_t at = bytes.find("name") - sizeof(std::uint32_t);
  bytes.replace(at, sizeof(std::uint32_t), "\xff\xff\xff\xff");
  EXPECT_THROW(Decoded(bytes), std::runtime_error);
}

TEST(ReportTest, ValuesThatDoNotExistThrow) {
  Report report;
  report.items.emplace_back();
  const std::string bytes = BytesOf(report);
  const std::size_t flush = 2 * sizeof(bool);
  const std::size_t kind = flush + sizeof(Report::Flush) + sizeof(std::uint32_t);
  for (const std::size_t at : {std::size_t{0}, std::size_t{1}, flush, kind}) {
    std::string damaged = bytes;
    damaged[at] = 77;
    EXPECT_THROW(Decoded(damaged), std::runtime_error) << "byte " << at;
  }
}

// --- Closings

TEST(ClosingTest, SurvivesTheJourneyBehindOthers) {
  const Closing sent = FullClosing();
  std::vector<std::int32_t> words = {-1, -1, -1};  // Horovod's devices come first
  Append(sent, words);
  Append(Closing{}, words);
  std::size_t at = 3;
  const Closing got = DecodeClosing(words, at);
  EXPECT_EQ(got.round, sent.round);
  EXPECT_EQ(got.reason, sent.reason);
  EXPECT_EQ(got.flushes, sent.flushes);
  EXPECT_EQ(got.flush_over, sent.flush_over);
  ASSERT_EQ(got.contributions.size(), sent.contributions.size());
  for (std::size_t rank = 0; rank < sent.contributions.size(); ++rank) {
    EXPECT_EQ(got.contributions[rank].gradients, sent.contributions[rank].gradients) << rank;
    EXPECT_EQ(got.contributions[rank].fresh, sent.contributions[rank].fresh) << rank;
    EXPECT_EQ(got.contributions[rank].stale, sent.contributions[rank].stale) << rank;
    EXPECT_EQ(got.contributions[rank].work, sent.contributions[rank].work) << rank;
  }
  EXPECT_EQ(got.groups, sent.groups);
  EXPECT_EQ(got.upcoming, sent.upcoming);
  const Closing next = DecodeClosing(words, at);
  EXPECT_FALSE(next.flushes);
  EXPECT_EQ(next.flush_over, Report::Flush::kNone);
  EXPECT_EQ(next.contributions.size(), 0u);
  EXPECT_EQ(at, words.size());
}

std::vector<std::int32_t> WordsOf(const Closing& closing) {
  std::vector<std::int32_t> words;
  Append(closing, words);
  return words;
}

void ExpectRefused(const std::vector<std::int32_t>& words, const std::string& what) {
  std::size_t at = 0;
  EXPECT_THROW(DecodeClosing(words, at), std::runtime_error) << what;
}

TEST(ClosingTest, EveryTruncationThrows) {
  for (auto words = WordsOf(FullClosing()); !words.empty();) {
    words.pop_back();
    ExpectRefused(words, std::to_string(words.size()) + " words");
  }
}

TEST(ClosingTest, WordsThatCannotBeThrow) {
  struct {
    std::size_t at;
    std::int32_t word;
    const char* what;
  } const cases[] = {
      {0, -1, "a negative number of ranks"},
      {3, 77, "a reason that does not exist"},
  };
  for (const auto& [at, word, what] : cases) {
    auto words = WordsOf(FullClosing());
    words[at] = word;
    ExpectRefused(words, what);
  }
}

TEST(ClosingTest, Counts) {
  const Closing closing = FullClosing();
  EXPECT_EQ(closing.fresh(), 3);
  EXPECT_EQ(closing.gradients(), 3 + 2 + (1 << 30) - 1);
}

TEST(ClosingTest, CountsInAGroup) {
  const Closing closing = FullClosing();
  EXPECT_THAT(closing.members(2), ElementsAre(0, 2));
  EXPECT_EQ(closing.fresh(2), 1);
  EXPECT_EQ(closing.gradients(2), 5);
  EXPECT_TRUE(closing.members(3).empty());
  EXPECT_FALSE(closing.Includes(3));
  EXPECT_TRUE(closing.Includes(4));
}

TEST(ClosingTest, ReasonsHaveNames) {
  using Reason = Closing::Reason;
  std::vector<std::string> names;
  for (const Reason reason :
       {Reason::kFirst, Reason::kEverybody, Reason::kQuorum, Reason::kLiveness, Reason::kFlush, Reason::kEnd})
    names.emplace_back(NameOf(reason));
  EXPECT_THAT(names, ElementsAre("first", "everybody", "quorum", "liveness", "flush", "end"));
}

}  // namespace
}  // namespace horovod_partial
