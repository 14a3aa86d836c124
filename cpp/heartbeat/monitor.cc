#include "heartbeat/monitor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <list>
#include <mutex>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/values/bytes.h"
#include "core/watch/heartbeats.h"
#include "core/watch/stalls.h"
#include "heartbeat/machine.h"

namespace horovod_partial::heartbeat {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kBeatsInLimit = 10;
constexpr milliseconds kStepsInterval(1000);  // the longest time from one heartbeat with steps to the next
constexpr char kBeat = 1, kMissing = 2, kWriteStacks = 3;
constexpr milliseconds kAnswerTimeout(3000), kPartingTimeout(1000);
// Limits for connections that have not said their rank yet: how many may be open, and how long each may stay open.
constexpr std::ptrdiff_t kMostStrangers = 64;
constexpr milliseconds kStrangerTimeout(10000);

milliseconds IntervalOf(const Limits& limits) {
  const auto never = [](Seconds limit) { return limit == Seconds(0) ? Seconds::max() : limit; };
  const Seconds shorter = std::min(never(limits.abort), never(limits.stall));
  if (shorter == Seconds::max()) return kStepsInterval;  // there are no limits, and steps are watched
  return std::max(milliseconds(1), std::chrono::duration_cast<milliseconds>(shorter / kBeatsInLimit));
}

// Returns how many heartbeat intervals a time limit has, at least kBeatsInLimit. A limit of 0 means for ever, and has
// INT_MAX intervals.
int CountOf(Seconds limit, milliseconds interval) {
  if (limit == Seconds(0)) return std::numeric_limits<int>::max();
  return std::max(kBeatsInLimit, static_cast<int>(limit / Seconds(interval)));
}

// Returns the heartbeat that reports a rank's training steps, or nothing while steps are not watched.
std::optional<Beat> BeatWithSteps(const Activity& activity, const Calls& calls, Machine& machine) {
  auto steps = calls.steps();
  if (!steps) return std::nullopt;
  return Beat{activity, std::move(*steps), machine.Look()};
}

// Calls `hear` when messages may have come, `pass` after each interval, and `watch` after each interval or
// kStepsInterval, whichever is shorter, until `hear` or `pass` returns false or the stop file is readable. `files` adds
// the files to poll. `hear` is always called before `pass`, so messages that came while this process was stopped are
// read first.
template <class Files, class Hear, class Pass, class Watch>
void Loop(int stop_file, milliseconds interval, Files files, Hear hear, Pass pass, Watch watch) {
  auto next = Clock::now() + interval;
  const milliseconds watch_interval = std::min(interval, kStepsInterval);
  auto next_watch = Clock::now() + watch_interval;
  while (true) {
    std::vector<pollfd> polled{{stop_file, POLLIN, 0}};
    files(polled);
    const auto left = std::chrono::ceil<milliseconds>(std::min(next, next_watch) - Clock::now());
    const int timeout = static_cast<int>(std::max<milliseconds::rep>(left.count(), 0));
    if (poll(polled.data(), polled.size(), timeout) < 0 && errno != EINTR) return;
    if ((polled.front().revents & POLLIN) != 0 || !hear()) return;
    if (Clock::now() >= next_watch) {
      watch();
      next_watch = Clock::now() + watch_interval;
    }
    if (Clock::now() < next) continue;
    if (!pass()) return;
    next = Clock::now() + interval;  // a stop of this process counts as at most one interval
  }
}

// The part of the heartbeat monitor that runs on rank 0.
class Center final : public Monitor::Watch {
 public:
  Center(int size, const Limits& limits, Calls calls)
      : size_(size),
        interval_(IntervalOf(limits)),
        calls_(std::move(calls)),
        heartbeats_(CountOf(limits.abort, interval_)),
        stalls_(CountOf(limits.stall, interval_)),
        slow_(size) {}

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
          for (auto& peer : peers_)
            if (peer.rank) peer.connection.Send({&kBeat, 1});
          lasting_.Pass(calls_.look());
          WatchWaits();
          missing = heartbeats_.Pass();
          out_of_files_ = false;  // in the next interval rank 0 tries again to accept connections
          return !missing;
        },
        [this] { WatchSteps(); });
    if (!missing) return;
    Tell(*missing);
    calls_.missing(*missing);
  }

  std::vector<WatchedRank> Ranks() const override {
    std::lock_guard<std::mutex> lock(slow_mutex_);
    return slow_.ranks();
  }

 private:
  struct Peer {
    Connection connection;
    std::string said;          // the part of the first message (hello) that has come so far
    Words words;               // the messages after the hello
    std::optional<Rank> rank;  // the rank at the other end; known once its hello has come
    Clock::time_point since = Clock::now();
  };

  bool Accepts() const {
    const auto is_stranger = [](const Peer& peer) { return !peer.rank; };
    return !out_of_files_ && std::count_if(peers_.begin(), peers_.end(), is_stranger) < kMostStrangers;
  }

  void Hear() {
    while (Accepts()) {
      if (auto connection = listener_.Accept()) {
        peers_.push_back({std::move(*connection), {}, {}, {}});
      } else {
        out_of_files_ = IsReadable(listener_.number(), milliseconds(0));
        break;
      }
    }
    for (auto peer = peers_.begin(); peer != peers_.end();)
      peer = HearFrom(*peer) ? std::next(peer) : peers_.erase(peer);
  }

  // Reads what has come over a connection. Returns false if the connection must be closed.
  bool HearFrom(Peer& peer) {
    auto received = peer.connection.Receive();
    if (peer.rank) return HearFromRank(peer, std::move(received));
    const auto& [state, bytes] = received;
    const bool is_open = state == Connection::Received::State::kOpen;
    if (!is_open || Clock::now() - peer.since > kStrangerTimeout) return false;
    peer.said += bytes;
    if (peer.said.size() < Hello::kBytes) return true;
    const auto hello = Hello::Decode(std::string_view(peer.said).substr(0, Hello::kBytes), secret_, size_);
    const auto is_known = [&](const Peer& other) { return hello && other.rank == hello->rank; };
    if (!hello || std::any_of(peers_.begin(), peers_.end(), is_known)) return false;
    peer.rank = hello->rank;
    heartbeats_.Heard(hello->rank);
    stalls_.Says(hello->rank, {});
    peer.connection.Send({&kBeat, 1});  // tells the other end that this is rank 0 of its job
    return true;
  }

  // Reads all messages that a rank has sent. The last one says what the rank does now.
  bool HearFromRank(Peer& peer, Connection::Received received) {
    using State = Connection::Received::State;
    try {
      for (; !received.bytes.empty(); received = peer.connection.Receive()) {
        heartbeats_.Heard(*peer.rank);
        peer.words.Add(received.bytes);
        while (const auto word = peer.words.Next()) {
          const Beat beat = FromBytes<Beat>(*word, "a heartbeat");
          stalls_.Says(*peer.rank, beat.activity);
          SaysSteps(*peer.rank, beat);
        }
      }
    } catch (const std::runtime_error&) {  // the bytes are malformed, and no rank of this job sends such bytes
      received.state = State::kEnded;
    }
    if (received.state == State::kEnded) {
      heartbeats_.Gone(*peer.rank);
      stalls_.Gone(*peer.rank);
    }
    if (received.state != State::kOpen) {
      std::lock_guard<std::mutex> lock(slow_mutex_);
      slow_.Gone(*peer.rank);
    }
    return received.state == State::kOpen;
  }

  void WatchWaits() {
    stalls_.Says(0, lasting_.last());
    const auto [stall, ends] = stalls_.Pass();
    if (ends) calls_.tell("the reported wait is over", "");
    if (!stall) return;
    const std::set<Rank> writers = stall->Writers();
    for (auto& peer : peers_)
      if (peer.rank && writers.count(*peer.rank) > 0) peer.connection.Send({&kWriteStacks, 1});
    calls_.explains();
    calls_.tell(stall->Describe(interval_), writers.count(0) > 0 ? Describe(lasting_.last(), interval_) : "");
  }

  void SaysSteps(Rank rank, const Beat& beat) {
    std::lock_guard<std::mutex> lock(slow_mutex_);
    slow_.Says(rank, beat);
  }

  void WatchSteps() {
    if (const auto beat = BeatWithSteps(lasting_.last(), calls_, machine_)) SaysSteps(0, *beat);
    std::string told;
    {
      std::lock_guard<std::mutex> lock(slow_mutex_);
      told = slow_.Pass();
    }
    if (!told.empty()) calls_.tell(told, "");
  }

  // Tells the other ranks which rank gives no sign of life. Waits until they have read the notice, but no longer than
  // kPartingTimeout. Otherwise the connections might end before the notice is read.
  void Tell(Rank missing) {
    const std::string notice = std::string(1, kMissing) + BytesOf(missing);
    for (auto& peer : peers_) {
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
  const Calls calls_;
  const std::string secret_ = RandomText(Hello::kSecretBytes);
  const Listener listener_;
  std::list<Peer> peers_;
  bool out_of_files_ = false;  // true if a connection could not be accepted; rank 0 tries again in the next interval
  Heartbeats heartbeats_;
  StallWatch stalls_;
  mutable std::mutex slow_mutex_;  // guards slow_, which other threads read in Ranks
  SlowWatch slow_;
  Machine machine_;
  Lasting lasting_;
};

// The part of the heartbeat monitor that runs on every rank but rank 0.
class Outer final : public Monitor::Watch {
 public:
  Outer(Connection center, const Limits& limits, Calls calls)
      : center_(std::move(center)),
        interval_(IntervalOf(limits)),
        calls_(std::move(calls)),
        heartbeats_(CountOf(limits.abort, interval_)),
        alone_(CountOf(limits.stall, interval_)) {
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
          if (state == Connection::Received::State::kLost) center_.reset();  // now no heartbeat of rank 0 can come
          // If rank 0 has ended, the monitor just stops, because Horovod and the launcher notice the end of rank 0.
          return !missing && state != Connection::Received::State::kEnded;
        },
        [&] {
          lasting_.Pass(calls_.look());
          Send({lasting_.last(), {}, {}});
          missing = heartbeats_.Pass();
          if (!missing) WatchAlone();
          return !missing;
        },
        [this] {
          if (const auto beat = BeatWithSteps(lasting_.last(), calls_, machine_)) Send(*beat);
        });
    if (missing) calls_.missing(*missing);
  }

 private:
  void Send(const Beat& beat) {
    if (center_) center_->Send(BytesOf(BytesOf(beat)));  // as Words reads it: the length comes first
  }

  void WatchAlone() {
    const int silence = heartbeats_.Silence(0);
    if (!alone_.Pass(silence, lasting_.last(), lasting_.held())) return;
    calls_.tell("rank 0 has given no sign of life for " + Lasted(silence, interval_) +
                    ": it is stopped, or its host or its network is down. It would know which other ranks are missing",
                Describe(lasting_.last(), interval_));
  }

  // Reads what rank 0 has sent. Once a notice of rank 0 is complete, returns the rank that gives no sign of life.
  std::optional<Rank> Read(const std::string& bytes) {
    for (const char byte : bytes) {
      if (notice_) *notice_ += byte;
      if (!notice_ && byte == kWriteStacks) calls_.tell("", Describe(lasting_.last(), interval_));
      if (!notice_ && byte == kMissing) notice_.emplace();
      if (notice_ && notice_->size() == sizeof(Rank)) return FromBytes<Rank>(*notice_, "a notice of a missing rank");
    }
    return std::nullopt;
  }

  std::optional<Connection> center_;
  const milliseconds interval_;
  const Calls calls_;
  std::optional<std::string> notice_;  // the part of rank 0's notice that has come so far: the number of a missing rank
  Heartbeats heartbeats_;
  LonelyWatch alone_;
  Machine machine_;
  Lasting lasting_;
};

// Connects to an address. Returns the connection if rank 0 of this job answers on it.
std::optional<Connection> Reach(const std::string& address, std::uint16_t port, const std::string& hello) {
  auto connection = Connect(address, port, kAnswerTimeout);
  if (!connection) return std::nullopt;
  connection->Send(hello);
  if (!IsReadable(connection->number(), kAnswerTimeout)) return std::nullopt;
  const std::string answer = connection->Receive().bytes;
  if (answer.empty() || answer.front() != kBeat) return std::nullopt;
  return connection;
}

// Returns a flag. Once the flag is set, `calls.look` says that this rank has come to its end, whatever the rank does.
std::shared_ptr<std::atomic<bool>> LetRest(Calls& calls) {
  auto rests = std::make_shared<std::atomic<bool>>(false);
  calls.look = [rests, look = std::move(calls.look)] {
    return *rests ? Look{{Activity::Kind::kResting, "its end", {}, 0}, 0, 0} : look();
  };
  return rests;
}

}  // namespace

std::unique_ptr<Monitor> Monitor::Listen(int size, const Limits& limits, Calls calls) {
  Flag rests = LetRest(calls);
  auto center = std::make_unique<Center>(size, limits, std::move(calls));
  std::string endpoint = center->endpoint().Encode();
  return std::unique_ptr<Monitor>(new Monitor(std::move(center), std::move(endpoint), std::move(rests)));
}

std::unique_ptr<Monitor> Monitor::Join(Rank rank, const Limits& limits, const std::string& endpoint, Calls calls) {
  const auto [port, secret, addresses] = Endpoint::Decode(endpoint);
  const std::string hello = Hello{secret, rank}.Encode();
  std::string tried;
  for (const auto& address : addresses) {
    if (auto center = Reach(address, port, hello)) {
      Flag rests = LetRest(calls);
      auto outer = std::make_unique<Outer>(std::move(*center), limits, std::move(calls));
      return std::unique_ptr<Monitor>(new Monitor(std::move(outer), {}, std::move(rests)));
    }
    tried += (tried.empty() ? "" : ", ") + address;
  }
  throw std::runtime_error("rank 0 does not answer on port " + std::to_string(port) + " of " + tried);
}

Monitor::Monitor(std::shared_ptr<Watch> watch, std::string endpoint, Flag rests)
    : process_(getpid()),
      stop_file_(eventfd(0, EFD_CLOEXEC)),
      endpoint_(std::move(endpoint)),
      rests_(std::move(rests)),
      watch_(std::move(watch)) {
  if (!stop_file_.is_open()) throw std::system_error(errno, std::generic_category(), "eventfd");
  // If the process ends without stopping the monitor's thread, the thread still runs while static objects are
  // destroyed. So the thread shares the ownership of `watch_`.
  thread_ = std::make_unique<std::thread>([watch = watch_, stop = stop_file_.number()] { watch->Run(stop); });
}

Monitor::~Monitor() {
  // A forked process does not have the monitor's thread, and another thread may have its id. So no thread is joined.
  if (getpid() != process_) {
    static_cast<void>(thread_.release());
    return;
  }
  eventfd_write(stop_file_.number(), 1);
  thread_->join();
}

}  // namespace horovod_partial::heartbeat
