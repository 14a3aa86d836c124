#include <fcntl.h>
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

#include "core/heartbeats.h"
#include "heartbeat/monitor.h"
#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {
namespace {

using namespace std::chrono_literals;

constexpr Seconds kLimit(0.2);
// Where nobody may be missed: so long no thread is kept from running.
constexpr Seconds kLongLimit(2);
constexpr auto kPatience = 20s;  // only a hang meets it

// What the monitors of some ranks have said, each from a thread of its own.
class Verdicts {
 public:
  OnMissing Of(Rank rank) {
    return [this, rank](Rank missing) {
      std::lock_guard<std::mutex> lock(mutex_);
      said_[rank] = missing;
      changed_.notify_all();
    };
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
  void Listen(int size, Seconds limit) {
    limit_ = limit;
    center_ = Monitor::Listen(size, limit, verdicts_.Of(0));
  }
  std::unique_ptr<Monitor> Join(Rank rank) {
    return Monitor::Join(rank, limit_, center_->endpoint(), verdicts_.Of(rank));
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
  Seconds limit_{0};
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
  const Connection stopped = Reach();
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
  const auto first = Monitor::Join(1, kLimit, endpoint, verdicts_.Of(1));
  const auto second = Monitor::Join(2, kLimit, endpoint, verdicts_.Of(2));
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
    const Connection stranger = Reach();
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
  EXPECT_THROW(Monitor::Join(1, kLimit, LocalEndpoint(port).Encode(), [](Rank) {}), std::runtime_error);
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

}  // namespace
}  // namespace horovod_partial::heartbeat
