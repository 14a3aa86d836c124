// When a wait is told, and of whom: cases, and every way in which three ranks can compute, wait and be stopped with few
// changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/values/bytes.h"
#include "core/watch/activity.h"
#include "core/watch/stalls.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;
using Kind = Activity::Kind;

constexpr int kLimit = 10;

Activity Waiting(int intervals, std::vector<Rank> needed = {}) {
  return {Kind::kWaiting, "a round of a", needed, intervals};
}

// Ranks that say the same in each interval, until they say something else or fall silent.
class StallWatchTest : public testing::Test {
 protected:
  StallWatch::News Pass() {
    for (const auto& [rank, activity] : says_) watch_.Says(rank, activity);
    return watch_.Pass();
  }
  // What is told within so many intervals.
  std::optional<Stall> Await(int intervals) {
    for (int i = 0; i < intervals; ++i)
      if (auto news = Pass(); news.begins) return news.begins;
    return std::nullopt;
  }

  std::map<Rank, Activity> says_ = {{0, Waiting(9)}, {1, {}}, {2, Waiting(3)}};
  StallWatch watch_{kLimit};
};

TEST_F(StallWatchTest, TellsWhoWaitsAndForWhom) {
  const auto stall = Await(2);
  ASSERT_TRUE(stall);
  EXPECT_EQ(stall->intervals, 9);
  EXPECT_THAT(stall->waiting, ElementsAre(Pair("a round of a", ElementsAre(0, 2))));
  EXPECT_THAT(stall->computing, ElementsAre(1));
  EXPECT_THAT(stall->Writers(), ElementsAre(0, 1, 2));
  EXPECT_EQ(stall->Describe(6s),
            "waiting for 54 s and longer: ranks 0 2 in a round of a. Missing: rank 1, which computes or sleeps. The "
            "stacks of all threads of ranks 0-2 are in their standard error");
}

TEST_F(StallWatchTest, TellsNothingOfShortWaits) {
  says_[0] = Waiting(6);
  EXPECT_FALSE(Await(20));
}

TEST_F(StallWatchTest, TellsNothingWhereNobodyWaits) {
  says_ = {{0, {}}, {1, {}}, {2, {Kind::kResting, "its end", {}, 100}}};
  EXPECT_FALSE(Await(20));
}

TEST_F(StallWatchTest, ARankThatIsSilentIsToldOfWhenThatIsCertain) {
  says_[0] = Waiting(6);
  EXPECT_FALSE(Pass().begins);
  says_.erase(1);
  EXPECT_FALSE(Await(3));
  says_[0] = Waiting(9);
  const auto stall = Await(kLimit);
  ASSERT_TRUE(stall);
  EXPECT_THAT(stall->silent, ElementsAre(Pair(1, kLimit / 2 + 1)));
  EXPECT_THAT(stall->computing, IsEmpty());
  EXPECT_THAT(stall->Writers(), ElementsAre(0, 2));
  EXPECT_THAT(stall->Describe(1s), HasSubstr("rank 1, which has given no sign of life for 6 s: it is stopped"));
}

TEST_F(StallWatchTest, WhoHasEndedJoinedOrIsNotNeededIsNotMissing) {
  says_ = {{0, Waiting(9, {0, 1, 3, 4})}, {1, {Kind::kResting, "a join", {}, 0}}, {2, {}}, {3, {}}, {4, {}}};
  Pass();
  says_.erase(4);
  watch_.Gone(4);
  const auto stall = Await(2);
  ASSERT_TRUE(stall);
  EXPECT_THAT(stall->computing, ElementsAre(3));
  EXPECT_THAT(stall->resting, ElementsAre(Pair("a join", ElementsAre(1))));
  EXPECT_THAT(stall->gone, ElementsAre(4));
}

TEST_F(StallWatchTest, RanksThatWaitForEachOtherMissNobody) {
  says_[1] = {Kind::kWaiting, "a flush", {}, 8};
  const auto stall = Await(2);
  ASSERT_TRUE(stall);
  EXPECT_THAT(stall->Describe(1s), HasSubstr("Missing: no rank: they wait for each other."));
}

TEST_F(StallWatchTest, AWaitIsToldOnceAndItsEndToo) {
  ASSERT_TRUE(Await(2));
  for (int i = 0; i < 3 * kLimit; ++i) {
    const auto [begins, ends] = Pass();
    EXPECT_FALSE(begins || ends);
  }
  says_[0] = Waiting(0);
  EXPECT_TRUE(Pass().ends);
  EXPECT_FALSE(Pass().ends);
  says_[0] = Waiting(9);
  EXPECT_FALSE(Await(7 * kLimit - 3)) << "too soon after the last one";
  EXPECT_TRUE(Await(2));
}

TEST_F(StallWatchTest, OldNewsAreNotTold) {
  EXPECT_FALSE(Pass().begins);
  says_[0] = {};
  EXPECT_FALSE(Await(20));
}

TEST(LonelyWatchTest, TellsOnceWhereRankZeroIsSilent) {
  LonelyWatch watch(kLimit);
  EXPECT_FALSE(watch.Pass(kLimit / 2, Waiting(9), 9)) << "rank 0 may live";
  EXPECT_FALSE(watch.Pass(kLimit, Waiting(6), 6));
  EXPECT_TRUE(watch.Pass(kLimit, {}, 7)) << "Horovod's cycle is held up";
  EXPECT_FALSE(watch.Pass(kLimit, Waiting(9), 9));
}

TEST(LastingTest, CountsIntervalsOfTheSameWait) {
  Lasting lasting;
  const Activity wait = Waiting(0);
  EXPECT_EQ(lasting.Pass({wait, 1, 1}).intervals, 0);
  EXPECT_EQ(lasting.Pass({wait, 1, 1}).intervals, 1);
  EXPECT_EQ(lasting.Pass({wait, 1, 1}).intervals, 2);
  EXPECT_EQ(lasting.held(), 2);
  EXPECT_EQ(lasting.Pass({wait, 2, 2}).intervals, 0) << "another wait for the same bucket";
  EXPECT_EQ(lasting.held(), 0);
  EXPECT_EQ(lasting.Pass({Activity{}, 0, 3}).intervals, 0);
}

Beat Decoded(const std::string& bytes) { return FromBytes<Beat>(bytes, "a heartbeat"); }

TEST(BeatTest, IsReadAsItWasWritten) {
  const Beat beat{{Kind::kWaiting, "a flush", {0, 3}, 7}, {{{7, 0.25}, {8, 0.5}}, 4096}, {1.5, 0.1, -1, 0.2}};
  EXPECT_EQ(Decoded(BytesOf(beat)), beat);
  EXPECT_THROW(Decoded(BytesOf(beat) + "x"), std::runtime_error);
  EXPECT_THROW(Decoded("\x07" + BytesOf(beat).substr(1)), std::runtime_error) << "no such kind";
}

std::string Framed(const std::string& word) { return BytesOf(word); }

TEST(WordsTest, ComeInAnyPieces) {
  const std::string bytes = Framed("first") + Framed("") + Framed("third");
  Words words;
  std::vector<std::string> heard;
  for (const char byte : bytes) {
    words.Add({&byte, 1});
    while (auto word = words.Next()) heard.push_back(*word);
  }
  EXPECT_THAT(heard, ElementsAre("first", "", "third"));
}

TEST(WordsTest, AreNotTooLong) {
  Words words;
  words.Add(Framed(std::string(Words::kLongest + 1, 'x')));
  EXPECT_THROW(words.Next(), std::runtime_error);
}

// What a rank does in each unit of time.
enum class Does { kComputes, kWaits, kIsStopped };
constexpr int kUnits = 12, kRanks = 3, kModelLimit = 6;
using Script = std::array<Does, kUnits>;

// All scripts with one change or none; and those that go back to what they were, if they are wanted.
std::vector<Script> Scripts(bool go_back) {
  std::set<Script> scripts;
  const auto all = {Does::kComputes, Does::kWaits, Does::kIsStopped};
  for (const Does first : all)
    for (const Does second : all)
      for (const Does third : all)
        for (int at = 1; at < kUnits; ++at)
          for (int then = at; then < kUnits; ++then) {
            Script script;
            for (int unit = 0; unit < kUnits; ++unit)
              script.at(unit) = unit < at ? first : unit < then ? second : third;
            if (second == third || (go_back && third == first)) scripts.insert(script);
          }
  return {scripts.begin(), scripts.end()};
}

// One unit is one interval of each rank that runs in it. It says what it does, and then, or before, rank 0 hears that
// and lets its interval pass.
class Model {
 public:
  Model(const std::array<const Script*, kRanks>& scripts, bool hears_first)
      : scripts_(scripts), hears_first_(hears_first) {
    for (Rank rank = 1; rank < kRanks; ++rank) watch_.Says(rank, {});
    for (int unit = 0; unit < kUnits; ++unit) Unit(unit);
  }
  int told() const { return told_; }

 private:
  Does DoesIn(Rank rank, int unit) const { return scripts_.at(rank)->at(unit); }
  bool Runs(Rank rank, int unit) const { return DoesIn(rank, unit) != Does::kIsStopped; }

  void Unit(int unit) {
    if (hears_first_) PassAtZero(unit);
    for (Rank rank = 1; rank < kRanks; ++rank)
      if (Runs(rank, unit)) inbox_.at(rank) = Say(rank, unit);
    if (!hears_first_) PassAtZero(unit);
  }

  // A stop in a wait makes no other wait of it.
  Activity Say(Rank rank, int unit) {
    const bool waits = DoesIn(rank, unit) == Does::kWaits;
    if (waits && !waited_.at(rank)) ++numbers_.at(rank);
    waited_.at(rank) = waits;
    return lasting_.at(rank).Pass({waits ? Waiting(0) : Activity{}, numbers_.at(rank), 0});
  }

  void PassAtZero(int unit) {
    if (!Runs(0, unit)) return;
    watch_.Says(0, Say(0, unit));
    for (Rank rank = 1; rank < kRanks; ++rank) {
      if (auto said = std::exchange(inbox_.at(rank), std::nullopt)) watch_.Says(rank, *said);
    }
    const auto [begins, ends] = watch_.Pass();
    if (begins) Judge(*begins, unit);
    told_ += begins ? 1 : 0;
    EXPECT_TRUE(told_ <= 1 && (!ends || told_ == 1));
    EXPECT_TRUE(told_ == 1 || !MustBeTold(unit)) << "unit " << unit;
  }

  // The last unit in which a rank has run, as rank 0 can know in this unit; -1 for none.
  int LastRun(Rank rank, int unit) const {
    int at = rank == 0 || !hears_first_ ? unit : unit - 1;
    while (at >= 0 && !Runs(rank, at)) --at;
    return at;
  }

  // For how many units that it ran a rank has waited, up to one of them.
  int WaitedUnits(Rank rank, int last) const {
    int count = 0;
    for (int at = last; at >= 0 && DoesIn(rank, at) != Does::kComputes; --at) count += Runs(rank, at) ? 1 : 0;
    return count;
  }

  void Judge(const Stall& stall, int unit) const {
    int longest = 0;
    for (Rank rank = 0; rank < kRanks; ++rank) {
      const int last = LastRun(rank, unit);
      const int waited = last < 0 ? 0 : WaitedUnits(rank, last);
      longest = std::max(longest, waited);
      const bool waits = stall.waiting.count("a round of a") > 0 && stall.waiting.at("a round of a").count(rank) > 0;
      const bool computes = stall.computing.count(rank) > 0, silent = stall.silent.count(rank) > 0;
      EXPECT_EQ(waits + computes + silent, 1) << "rank " << rank;
      EXPECT_TRUE(!waits || waited >= 2) << "rank " << rank << " computes";
      EXPECT_TRUE(!computes || waited <= 1) << "rank " << rank << " waits";
      int silence = 0;  // intervals of rank 0 since
      for (int at = std::max(last, 0); at < unit; ++at) silence += Runs(0, at) ? 1 : 0;
      EXPECT_TRUE(!silent || silence >= kModelLimit / 2) << "rank " << rank << " runs";
      EXPECT_TRUE(silent || silence <= 2) << "rank " << rank << " is stopped";
    }
    EXPECT_GE(longest, kModelLimit - 2);
  }

  // Some rank has waited for the limit, in which rank 0 has run, and nothing was stopped or went on.
  bool MustBeTold(int unit) const {
    if (unit < kModelLimit) return false;
    bool waits = false;
    for (Rank rank = 0; rank < kRanks; ++rank) {
      bool all_waited = true;
      for (int at = unit - kModelLimit; at <= unit; ++at) {
        if (Runs(rank, at) != Runs(rank, unit) || !Runs(0, at)) return false;
        all_waited = all_waited && DoesIn(rank, at) == Does::kWaits;
      }
      waits = waits || all_waited;
    }
    return waits;
  }

  const std::array<const Script*, kRanks> scripts_;
  const bool hears_first_;
  StallWatch watch_{kModelLimit};
  std::array<Lasting, kRanks> lasting_;
  std::array<bool, kRanks> waited_{};
  std::array<std::uint64_t, kRanks> numbers_{};
  std::array<std::optional<Activity>, kRanks> inbox_;
  int told_ = 0;
};

TEST(StallModelTest, EachStallIsToldInTimeAndOfNobodyWhatIsNotSo) {
  const auto few = Scripts(false), more = Scripts(true);
  int told = 0;
  for (const auto& zero : few)
    for (const auto& one : few)
      for (const auto& two : more)
        for (const bool hears_first : {false, true}) {
          told += Model({&zero, &one, &two}, hears_first).told();
          if (testing::Test::HasFailure()) return;
        }
  EXPECT_GT(told, 0);
}

}  // namespace
}  // namespace horovod_partial
