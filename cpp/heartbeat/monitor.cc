#include "heartbeat/monitor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include "core/heartbeats.h"
#include "heartbeat/socket.h"

namespace horovod_partial::heartbeat {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kBeatsInLimit = 10;
constexpr char kBeat = 1, kMissing = 2;
constexpr milliseconds kAnswerTimeout(3000), kPartingTimeout(1000);
// Connections that have not said yet who they are: more than these wait until they are heard, and none is kept for
// longer.
constexpr std::ptrdiff_t kMostStrangers = 64;
constexpr milliseconds kStrangerTimeout(10000);

milliseconds IntervalOf(Seconds limit) {
  return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(limit / kBeatsInLimit));
}

// Calls `hear` whenever something may have come, and `pass` after each interval, until one of them returns false or the
// file says that it is over. What has come is always heard before an interval passes: also what came while this process
// was stopped.
template <class Files, class Hear, class Pass>
void Loop(int stop_file, milliseconds interval, Files files, Hear hear, Pass pass) {
  auto next = Clock::now() + interval;
  while (true) {
    std::vector<pollfd> polled{{stop_file, POLLIN, 0}};
    files(polled);
    const auto left = std::chrono::ceil<milliseconds>(next - Clock::now());
    const int timeout = static_cast<int>(std::max<milliseconds::rep>(left.count(), 0));
    if (poll(polled.data(), polled.size(), timeout) < 0 && errno != EINTR) return;
    if ((polled.front().revents & POLLIN) != 0 || !hear()) return;
    if (Clock::now() < next) continue;
    if (!pass()) return;
    next = Clock::now() + interval;  // one interval at most, however long this process was stopped
  }
}

// Rank 0's part.
class Center final : public Monitor::Watch {
 public:
  Center(int size, Seconds limit, OnMissing on_missing)
      : size_(size), interval_(IntervalOf(limit)), on_missing_(std::move(on_missing)) {}

  Endpoint endpoint() const { return {listener_.port(), secret_, OwnAddresses()}; }

  void Run(int stop_file) override {
    std::optional<Rank> missing;
    Loop(
        stop_file, interval_,
        [this](std::vector<pollfd>& polled) {
          if (Accepts()) polled.push_back({listener_.number(), POLLIN, 0});
          for (const auto& peer : peers_) polled.push_back({peer.connection.number(), POLLIN, 0});
        },
        [this] {
          Hear();
          return true;
        },
        [&] {
          for (const auto& peer : peers_)
            if (peer.rank) peer.connection.Send({&kBeat, 1});
          missing = heartbeats_.Pass();
          out_of_files_ = false;  // perhaps
          return !missing;
        });
    if (!missing) return;
    Tell(*missing);
    on_missing_(*missing);
  }

 private:
  struct Peer {
    Connection connection;
    std::string said;          // until it is a whole hello
    std::optional<Rank> rank;  // once it has said so
    Clock::time_point since = Clock::now();
  };

  bool Accepts() const {
    const auto is_stranger = [](const Peer& peer) { return !peer.rank; };
    return !out_of_files_ && std::count_if(peers_.begin(), peers_.end(), is_stranger) < kMostStrangers;
  }

  void Hear() {
    while (Accepts()) {
      if (auto connection = listener_.Accept()) {
        peers_.push_back({std::move(*connection), {}, {}});
      } else {
        out_of_files_ = IsReadable(listener_.number(), milliseconds(0));
        break;
      }
    }
    for (auto peer = peers_.begin(); peer != peers_.end();)
      peer = HearFrom(*peer) ? std::next(peer) : peers_.erase(peer);
  }

  // Whether the connection stays.
  bool HearFrom(Peer& peer) {
    const auto [state, bytes] = peer.connection.Receive();
    const bool is_open = state == Connection::Received::State::kOpen;
    if (peer.rank) {
      if (state == Connection::Received::State::kEnded) heartbeats_.Gone(*peer.rank);
      if (!bytes.empty()) heartbeats_.Heard(*peer.rank);
      return is_open;
    }
    if (!is_open || Clock::now() - peer.since > kStrangerTimeout) return false;
    peer.said += bytes;
    if (peer.said.size() < Hello::kBytes) return true;
    const auto hello = Hello::Decode(std::string_view(peer.said).substr(0, Hello::kBytes), secret_, size_);
    const auto is_known = [&](const Peer& other) { return hello && other.rank == hello->rank; };
    if (!hello || std::any_of(peers_.begin(), peers_.end(), is_known)) return false;
    peer.rank = hello->rank;
    heartbeats_.Heard(hello->rank);
    peer.connection.Send({&kBeat, 1});  // which tells the other end that it has found its rank 0
    return true;
  }

  // Sends the notice, and waits a moment until it has been read: closing would overtake it.
  void Tell(Rank missing) {
    const std::string notice = std::string(1, kMissing) + MissingNotice{missing}.Encode();
    for (const auto& peer : peers_) {
      peer.connection.Send(notice);
      peer.connection.CloseSending();
    }
    const auto end = Clock::now() + kPartingTimeout;
    peers_.remove_if([&](const Peer& peer) { return !peer.rank || peer.rank == missing; });
    while (!peers_.empty() && Clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(5));
      peers_.remove_if(
          [](const Peer& peer) { return peer.connection.Receive().state != Connection::Received::State::kOpen; });
    }
  }

  const int size_;
  const milliseconds interval_;
  const OnMissing on_missing_;
  const std::string secret_ = RandomBytes(Hello::kSecretBytes);
  const Listener listener_;
  std::list<Peer> peers_;
  bool out_of_files_ = false;  // somebody waits to be accepted, until the next interval
  Heartbeats heartbeats_{kBeatsInLimit};
};

// Any other rank's part.
class Outer final : public Monitor::Watch {
 public:
  Outer(Connection center, Seconds limit, OnMissing on_missing)
      : center_(std::move(center)), interval_(IntervalOf(limit)), on_missing_(std::move(on_missing)) {
    heartbeats_.Heard(0);
  }

  void Run(int stop_file) override {
    std::optional<Rank> missing;
    Loop(
        stop_file, interval_,
        [this](std::vector<pollfd>& polled) {
          if (center_) polled.push_back({center_->number(), POLLIN, 0});
        },
        [&] {
          if (!center_) return true;
          const auto [state, bytes] = center_->Receive();
          if (!bytes.empty()) heartbeats_.Heard(0);
          missing = Read(bytes);
          if (state == Connection::Received::State::kLost) center_.reset();  // from now on rank 0 is silent
          // A rank 0 that has ended is no news: Horovod and the launcher notice that.
          return !missing && state != Connection::Received::State::kEnded;
        },
        [&] {
          if (center_) center_->Send({&kBeat, 1});
          missing = heartbeats_.Pass();
          return !missing;
        });
    if (missing) on_missing_(*missing);
  }

 private:
  // The rank that a notice names, once it has come whole.
  std::optional<Rank> Read(const std::string& bytes) {
    for (const char byte : bytes) {
      if (notice_) *notice_ += byte;
      if (!notice_ && byte == kMissing) notice_.emplace();
      if (notice_ && notice_->size() == MissingNotice::kBytes) return MissingNotice::Decode(*notice_).rank;
    }
    return std::nullopt;
  }

  std::optional<Connection> center_;
  const milliseconds interval_;
  const OnMissing on_missing_;
  std::optional<std::string> notice_;  // what has come of it
  Heartbeats heartbeats_{kBeatsInLimit};
};

// A connection on which rank 0 of this job has answered.
std::optional<Connection> Reach(const std::string& address, std::uint16_t port, const std::string& hello) {
  auto connection = Connect(address, port, kAnswerTimeout);
  if (!connection) return std::nullopt;
  connection->Send(hello);
  if (!IsReadable(connection->number(), kAnswerTimeout)) return std::nullopt;
  const std::string answer = connection->Receive().bytes;
  if (answer.empty() || answer.front() != kBeat) return std::nullopt;
  return connection;
}

}  // namespace

std::unique_ptr<Monitor> Monitor::Listen(int size, Seconds limit, OnMissing on_missing) {
  auto center = std::make_unique<Center>(size, limit, std::move(on_missing));
  std::string endpoint = center->endpoint().Encode();
  return std::unique_ptr<Monitor>(new Monitor(std::move(center), std::move(endpoint)));
}

std::unique_ptr<Monitor> Monitor::Join(Rank rank, Seconds limit, const std::string& endpoint, OnMissing on_missing) {
  const auto [port, secret, addresses] = Endpoint::Decode(endpoint);
  const std::string hello = Hello{secret, rank}.Encode();
  std::string tried;
  for (const auto& address : addresses) {
    if (auto center = Reach(address, port, hello))
      return std::unique_ptr<Monitor>(
          new Monitor(std::make_unique<Outer>(std::move(*center), limit, std::move(on_missing)), {}));
    tried += (tried.empty() ? "" : ", ") + address;
  }
  throw std::runtime_error("rank 0 does not answer on port " + std::to_string(port) + " of " + tried);
}

Monitor::Monitor(std::unique_ptr<Watch> watch, std::string endpoint)
    : process_(getpid()), stop_file_(eventfd(0, EFD_CLOEXEC)), endpoint_(std::move(endpoint)) {
  if (!stop_file_.is_open()) throw std::system_error(errno, std::generic_category(), "eventfd");
  // The thread owns its part: where the process ends without stopping it, it runs on beside static objects' ends.
  thread_ = std::make_unique<std::thread>([watch = std::move(watch), stop = stop_file_.number()] { watch->Run(stop); });
}

Monitor::~Monitor() {
  if (getpid() != process_) {  // forked: the thread is the parent's, and its number may be another one's here
    static_cast<void>(thread_.release());
    return;
  }
  eventfd_write(stop_file_.number(), 1);
  thread_->join();
}

}  // namespace horovod_partial::heartbeat
