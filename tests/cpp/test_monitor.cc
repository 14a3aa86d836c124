#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/watch/heartbeats.h"
#include "heartbeat/monitor.h"
#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr Seconds kLimit(0.2);
// Where nobody may be missed: so long no thread is kept from running.
constexpr Seconds kLongLimit(2);
constexpr Seconds kStall(1);
constexpr auto kPatience = 20s;  // only a hang meets it

// What the monitors of some ranks have said, each from a thread of its own.
class Verdicts {
 public:
  Calls Of(Rank rank) {
    Calls calls;
    calls.missing = [this, rank](Rank missing) {
      std::lock_guard<std::mutex> lock(mutex_);
      said_[rank] = missing;
      changed_.notify_all();
    };
    calls.look = [this, rank] {
      std::lock_guard<std::mutex> lock(mutex_);
      return Look{does_[rank], 0, 0};
    };
    calls.steps = [this, rank]() -> std::optional<StepReport> {
      std::lock_guard<std::mutex> lock(mutex_);
      if (steps_.count(rank) == 0) return std::nullopt;
      StepReport report;
      for (int i = 0; i < 20; ++i) report.ended.push_back({number_[rank]++, steps_[rank]});
      return report;
    };
    calls.tell = [this, rank](const std::string& text, const std::string& doing) {
      std::lock_guard<std::mutex> lock(mutex_);
      told_[rank].push_back(text + '|' + doing);
      changed_.notify_all();
    };
    return calls;
  }
  void LetWait(Rank rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    does_[rank] = {Activity::Kind::kWaiting, "a flush", {}, 0};
  }
  // The rank takes 20 steps of this length each time.
  void LetStep(Rank rank, double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    steps_[rank] = seconds;
  }
  // What a rank is told first.
  std::string AwaitTold(Rank rank) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, kPatience, [&] { return !told_[rank].empty(); });
    return told_[rank].empty() ? "" : told_[rank].front();
  }
  bool IsTold(Rank rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    return !told_[rank].empty();
  }
  std::optional<Rank> Await(Rank rank) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, kPatience, [&] { return said_.count(rank) == 1; });
    return said_.count(rank) == 1 ? std::optional<Rank>(said_[rank]) : std::nullopt;
  }
  bool IsEmpty() {
    std::lock_guard<std::mutex> lock(mutex_);
    return said_.empty();
  }

 private:
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::map<Rank, Rank> said_;
  std::map<Rank, Activity> does_;
  std::map<Rank, double> steps_;
  std::map<Rank, std::int64_t> number_;
  std::map<Rank, std::vector<std::string>> told_;
};

void ExpectEndsWell(pid_t child) {
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

Endpoint LocalEndpoint(std::uint16_t port) { return {port, std::string(Hello::kSecretBytes, 'x'), {"127.0.0.1"}}; }

// Rank 0's monitor, the others', and what they say.
class MonitorTest : public testing::Test {
 protected:
  void Listen(int size, Seconds limit, Seconds stall = Seconds(0)) {
    limit_ = limit;
    stall_ = stall;
    center_ = Monitor::Listen(size, {limit, stall}, verdicts_.Of(0));
  }
  std::unique_ptr<Monitor> Join(Rank rank) {
    return Monitor::Join(rank, {limit_, stall_}, center_->endpoint(), verdicts_.Of(rank));
  }
  Endpoint endpoint() const { return Endpoint::Decode(center_->endpoint()); }
  Connection Reach() const {
    const Endpoint at = endpoint();
    auto connection = Connect(at.addresses.front(), at.port, 3000ms);
    if (!connection) throw std::runtime_error("rank 0 cannot be reached");
    return std::move(*connection);
  }
  void ExpectNobodyMissed() {
    std::this_thread::sleep_for(1.5 * limit_);
    EXPECT_TRUE(verdicts_.IsEmpty());
  }

  Verdicts verdicts_;
  Seconds limit_{0}, stall_{0};
  std::unique_ptr<Monitor> center_;
};

TEST_F(MonitorTest, NobodyIsMissedWhileAllLive) {
  Listen(3, kLongLimit);
  const auto first = Join(1), second = Join(2);
  ExpectNobodyMissed();
}

TEST_F(MonitorTest, AllHearThatARankIsMissing) {
  Listen(4, kLimit);
  const auto first = Join(1), third = Join(3);
  // It says who it is, and then nothing: as one whose process is stopped.
  Connection stopped = Reach();
  stopped.Send(Hello{endpoint().secret, 2}.Encode());
  for (const Rank rank : {0, 1, 3}) EXPECT_EQ(verdicts_.Await(rank), 2) << "on rank " << rank;
}

TEST_F(MonitorTest, AMissingRankZeroIsNoticedByEachRank) {
  const Listener listener;
  const std::string endpoint = LocalEndpoint(listener.port()).Encode();
  // Answers a rank, and stops.
  std::vector<Connection> answered;
  std::thread center([&] {
    while (answered.size() < 2)
      if (auto connection = listener.Accept()) {
        connection->Send("\1");
        answered.push_back(std::move(*connection));
      }
  });
  const auto first = Monitor::Join(1, {kLimit, {}}, endpoint, verdicts_.Of(1));
  const auto second = Monitor::Join(2, {kLimit, {}}, endpoint, verdicts_.Of(2));
  center.join();
  for (const Rank rank : {1, 2}) EXPECT_EQ(verdicts_.Await(rank), 0) << "on rank " << rank;
}

TEST_F(MonitorTest, WhoHasEndedIsNotMissed) {
  Listen(3, kLongLimit);
  const auto first = Join(1);
  Join(2).reset();
  ExpectNobodyMissed();
}

TEST_F(MonitorTest, StrangersAreNotHeard) {
  Listen(3, kLongLimit);
  const auto first = Join(1);
  const std::string secret = endpoint().secret, other_secret(Hello::kSecretBytes, 'x');
  for (const std::string& said :
       {std::string("GET /index.html HTTP/1.0\r\n\r\n"), std::string(100'000, 'x'), Hello{other_secret, 2}.Encode(),
        Hello{secret, 7}.Encode(), Hello{secret, 1}.Encode()}) {  // rank 1 is there already
    Connection stranger = Reach();
    stranger.Send(said);
    ASSERT_TRUE(IsReadable(stranger.number(), 10s)) << "it is closed";
    EXPECT_EQ(stranger.Receive().bytes, "");
  }
  ExpectNobodyMissed();
}

TEST_F(MonitorTest, JoiningWhereNobodyAnswersFails) {
  std::uint16_t port = 0;
  {
    const Listener gone;
    port = gone.port();
  }
  EXPECT_THROW(Monitor::Join(1, {kLimit, {}}, LocalEndpoint(port).Encode(), {}), std::runtime_error);
}

TEST_F(MonitorTest, WhoWaitsAndWhoIsWaitedForWriteTheirStacks) {
  Listen(3, Seconds(0), kStall);
  const auto first = Join(1), second = Join(2);
  verdicts_.LetWait(1);
  EXPECT_THAT(verdicts_.AwaitTold(0), AllOf(HasSubstr("rank 1 in a flush"), HasSubstr("Missing: ranks 0 2"),
                                            HasSubstr("|is in no wait that is known")));
  EXPECT_THAT(verdicts_.AwaitTold(1), StartsWith("|has waited in a flush"));
  EXPECT_THAT(verdicts_.AwaitTold(2), StartsWith("|is in no wait"));
  EXPECT_TRUE(verdicts_.IsEmpty()) << "nobody ends";
}

TEST_F(MonitorTest, WhoIsStoppedIsNamed) {
  Listen(3, Seconds(0), kStall);
  const auto first = Join(1);
  Connection stopped = Reach();
  stopped.Send(Hello{endpoint().secret, 2}.Encode());
  verdicts_.LetWait(1);
  EXPECT_THAT(verdicts_.AwaitTold(0), HasSubstr("rank 2, which has given no sign of life"));
}

TEST_F(MonitorTest, WhereRankZeroIsStoppedEachRankWritesItsStacks) {
  const Listener listener;
  const std::string endpoint = LocalEndpoint(listener.port()).Encode();
  std::optional<Connection> answered;
  std::thread center([&] {
    while (!answered)
      if (auto one = listener.Accept()) answered.emplace(std::move(*one));
    answered->Send("\1");
  });
  verdicts_.LetWait(1);
  const auto first = Monitor::Join(1, {{}, kStall}, endpoint, verdicts_.Of(1));
  center.join();
  EXPECT_THAT(verdicts_.AwaitTold(1),
              AllOf(HasSubstr("rank 0 has given no sign of life"), HasSubstr("|has waited in")));
}

TEST_F(MonitorTest, WhoRestsIsNotWaitedFor) {
  Listen(2, Seconds(0), kStall);
  const auto first = Join(1);
  verdicts_.LetWait(1);
  first->Rest();
  center_->Rest();
  std::this_thread::sleep_for(1.5 * kStall);
  EXPECT_FALSE(verdicts_.IsTold(0) || verdicts_.IsTold(1));
}

TEST_F(MonitorTest, DamagedWordsEndAConnection) {
  Listen(3, Seconds(0), kStall);
  Connection damaged = Reach();
  damaged.Send(Hello{endpoint().secret, 2}.Encode());
  ASSERT_TRUE(IsReadable(damaged.number(), 10s));
  damaged.Receive();
  damaged.Send(std::string(64, '\xff'));
  while (damaged.Receive().state == Connection::Received::State::kOpen) IsReadable(damaged.number(), 10s);
  EXPECT_TRUE(verdicts_.IsEmpty());
}

TEST_F(MonitorTest, MoreRanksThanMayBeUnknownAtOnceFindTheirWay) {
  constexpr int kSize = 100;
  Listen(kSize, Seconds(20));
  std::vector<std::future<std::unique_ptr<Monitor>>> others;
  for (Rank rank = 1; rank < kSize; ++rank)
    others.push_back(std::async(std::launch::async, [&, rank] { return Join(rank); }));
  for (auto& other : others) EXPECT_NE(other.get(), nullptr);
  EXPECT_TRUE(verdicts_.IsEmpty());
}

TEST_F(MonitorTest, ARankEndsAlsoWhereItsChildrenLiveOn) {
  Listen(2, kLongLimit);
  auto first = Join(1);
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  first.reset();
  ExpectNobodyMissed();
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// The connections of a process that was killed, seen from a child of it: none are left there.
TEST_F(MonitorTest, AForkedProcessHasNoConnection) {
  const Listener listener;
  const auto connection = Connect("127.0.0.1", listener.port(), 3000ms);
  ASSERT_TRUE(connection);
  const pid_t child = fork();
  if (child == 0) _exit(fcntl(connection->number(), F_GETFD) == -1 && fcntl(listener.number(), F_GETFD) == -1 ? 0 : 1);
  ExpectEndsWell(child);
}

TEST_F(MonitorTest, AForkedProcessLeavesItAlone) {
  Listen(2, kLongLimit);
  auto first = Join(1);
  const pid_t child = fork();
  if (child == 0) {
    center_.reset();
    first.reset();
    _exit(0);
  }
  ExpectEndsWell(child);
  ExpectNobodyMissed();
}

TEST_F(MonitorTest, RankZeroHearsWhoIsSlow) {
  for (const Rank rank : {0, 1}) verdicts_.LetStep(rank, 0.1);
  verdicts_.LetStep(2, 0.25);
  Listen(3, Seconds(0));
  const auto first = Join(1), second = Join(2);
  EXPECT_THAT(verdicts_.AwaitTold(0),
              AllOf(StartsWith("rank 2 takes 2.5 times (95 %: 2.5 to 2.5) as long as the median rank, in "),
                    HasSubstr(" steps since step ")));
  const auto known = center_->Ranks();
  ASSERT_EQ(known.size(), 3U);
  EXPECT_TRUE(known[2].slowness);
  EXPECT_GT(known[1].steps, 0);
  EXPECT_TRUE(first->Ranks().empty()) << "only rank 0 knows";
}

}  // namespace
}  // namespace horovod_partial::heartbeat
