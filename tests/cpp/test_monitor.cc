#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>

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

struct Address {
  explicit Address(const std::string& endpoint) {
    std::istringstream text(endpoint);
    int number = 0;
    text >> number >> secret >> address;
    port = static_cast<std::uint16_t>(number);
  }
  std::uint16_t port;
  std::string secret, address;
};

std::string Unhexed(const std::string& text) {
  std::string bytes;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return bytes;
}

// A rank that has said who it is, and then nothing: as one whose process is stopped.
Connection Stopped(const std::string& endpoint, Rank rank) {
  const Address address(endpoint);
  auto connection = Connect(address.address, address.port, 3000ms);
  if (!connection) throw std::runtime_error("rank 0 cannot be reached");
  connection->Send(Hello{Unhexed(address.secret), rank}.Encode());
  return std::move(*connection);
}

TEST(MonitorTest, NobodyIsMissedWhileAllLive) {
  Verdicts verdicts;
  const auto center = Monitor::Listen(3, kLongLimit, verdicts.Of(0));
  const auto first = Monitor::Join(1, kLongLimit, center->endpoint(), verdicts.Of(1));
  const auto second = Monitor::Join(2, kLongLimit, center->endpoint(), verdicts.Of(2));
  std::this_thread::sleep_for(1.5 * kLongLimit);
  EXPECT_TRUE(verdicts.IsEmpty());
}

TEST(MonitorTest, AllHearThatARankIsMissing) {
  Verdicts verdicts;
  const auto center = Monitor::Listen(4, kLimit, verdicts.Of(0));
  const auto first = Monitor::Join(1, kLimit, center->endpoint(), verdicts.Of(1));
  const auto third = Monitor::Join(3, kLimit, center->endpoint(), verdicts.Of(3));
  const Connection stopped = Stopped(center->endpoint(), 2);
  for (const Rank rank : {0, 1, 3}) EXPECT_EQ(verdicts.Await(rank), 2) << "on rank " << rank;
}

TEST(MonitorTest, AMissingRankZeroIsNoticedByEachRank) {
  Verdicts verdicts;
  const Listener listener;
  const std::string endpoint = std::to_string(listener.port()) + " " + std::string(32, '0') + " 127.0.0.1";
  // Answers a rank, and stops.
  std::vector<Connection> answered;
  std::thread center([&] {
    while (answered.size() < 2)
      if (auto connection = listener.Accept()) {
        connection->Send("\1");
        answered.push_back(std::move(*connection));
      }
  });
  const auto first = Monitor::Join(1, kLimit, endpoint, verdicts.Of(1));
  const auto second = Monitor::Join(2, kLimit, endpoint, verdicts.Of(2));
  center.join();
  for (const Rank rank : {1, 2}) EXPECT_EQ(verdicts.Await(rank), 0) << "on rank " << rank;
}

TEST(MonitorTest, WhoHasEndedIsNotMissed) {
  Verdicts verdicts;
  const auto center = Monitor::Listen(3, kLongLimit, verdicts.Of(0));
  const auto first = Monitor::Join(1, kLongLimit, center->endpoint(), verdicts.Of(1));
  {
    const auto second = Monitor::Join(2, kLongLimit, center->endpoint(), verdicts.Of(2));
  }
  std::this_thread::sleep_for(1.5 * kLongLimit);
  EXPECT_TRUE(verdicts.IsEmpty());
}

TEST(MonitorTest, StrangersAreNotHeard) {
  Verdicts verdicts;
  const auto center = Monitor::Listen(3, kLongLimit, verdicts.Of(0));
  const auto first = Monitor::Join(1, kLongLimit, center->endpoint(), verdicts.Of(1));
  const Address address(center->endpoint());
  const std::string other_secret(Hello::kSecretBytes, 'x');
  for (const std::string& said : {std::string("GET /index.html HTTP/1.0\r\n\r\n"), std::string(100'000, 'x'),
                                  Hello{other_secret, 2}.Encode(), Hello{Unhexed(address.secret), 7}.Encode(),
                                  Hello{Unhexed(address.secret), 1}.Encode()}) {  // rank 1 is there already
    const auto stranger = Connect(address.address, address.port, 3000ms);
    ASSERT_TRUE(stranger);
    stranger->Send(said);
    ASSERT_TRUE(IsReadable(stranger->number(), 10s)) << "it is closed";
    EXPECT_EQ(stranger->Receive().bytes, "");
  }
  std::this_thread::sleep_for(1.5 * kLongLimit);
  EXPECT_TRUE(verdicts.IsEmpty());
}

TEST(MonitorTest, JoiningWhereNobodyAnswersFails) {
  std::uint16_t port = 0;
  {
    const Listener gone;
    port = gone.port();
  }
  const std::string endpoint = std::to_string(port) + " " + std::string(32, '0') + " 127.0.0.1";
  EXPECT_THROW(Monitor::Join(1, kLimit, endpoint, [](Rank) {}), std::runtime_error);
}

TEST(MonitorTest, MoreRanksThanMayBeUnknownAtOnceFindTheirWay) {
  constexpr int kSize = 100;
  constexpr Seconds kLong(20);
  Verdicts verdicts;
  const auto center = Monitor::Listen(kSize, kLong, verdicts.Of(0));
  std::vector<std::future<std::unique_ptr<Monitor>>> others;
  for (Rank rank = 1; rank < kSize; ++rank)
    others.push_back(std::async(
        std::launch::async, [&, rank] { return Monitor::Join(rank, kLong, center->endpoint(), verdicts.Of(rank)); }));
  for (auto& other : others) EXPECT_NE(other.get(), nullptr);
  EXPECT_TRUE(verdicts.IsEmpty());
}

TEST(MonitorTest, ARankEndsAlsoWhereItsChildrenLiveOn) {
  Verdicts verdicts;
  const auto center = Monitor::Listen(2, kLongLimit, verdicts.Of(0));
  auto first = Monitor::Join(1, kLongLimit, center->endpoint(), verdicts.Of(1));
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  first.reset();
  std::this_thread::sleep_for(1.5 * kLongLimit);
  EXPECT_TRUE(verdicts.IsEmpty());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// The connections of a process that was killed, seen from a child of it: none are left there.
TEST(MonitorTest, AForkedProcessHasNoConnection) {
  const Listener listener;
  const auto connection = Connect("127.0.0.1", listener.port(), 3000ms);
  ASSERT_TRUE(connection);
  const pid_t child = fork();
  if (child == 0) _exit(fcntl(connection->number(), F_GETFD) == -1 && fcntl(listener.number(), F_GETFD) == -1 ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(MonitorTest, AForkedProcessLeavesItAlone) {
  Verdicts verdicts;
  auto center = Monitor::Listen(2, kLongLimit, verdicts.Of(0));
  auto first = Monitor::Join(1, kLongLimit, center->endpoint(), verdicts.Of(1));
  const pid_t child = fork();
  if (child == 0) {
    center.reset();
    first.reset();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  std::this_thread::sleep_for(1.5 * kLongLimit);
  EXPECT_TRUE(verdicts.IsEmpty());
}

}  // namespace
}  // namespace horovod_partial::heartbeat
