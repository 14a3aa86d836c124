#include "heartbeat/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <mutex>
#include <set>
#include <system_error>

namespace horovod_partial::heartbeat {
namespace {

// The files of all File objects in this process. A forked process closes its copies, so its objects close nothing.
class OpenFiles {
 public:
  OpenFiles() {
    pthread_atfork([] { All().mutex_.lock(); }, [] { All().mutex_.unlock(); }, [] { All().CloseInChild(); });
  }
  static OpenFiles& All() {
    static auto* all = new OpenFiles;  // never freed, because files may be closed after static objects are destroyed
    return *all;
  }
  void Add(int number) {
    std::lock_guard<std::mutex> lock(mutex_);
    numbers_.insert(number);
  }
  void Close(int number) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (numbers_.erase(number) == 1) close(number);
  }

 private:
  // Runs in the child process after a fork. Before the fork its parent has locked the mutex.
  void CloseInChild() {
    for (const int number : numbers_) close(number);
    numbers_.clear();
    mutex_.unlock();
  }

  std::mutex mutex_;  // this mutex guards the numbers of the open files
  std::set<int> numbers_;
};

[[noreturn]] void Throw(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

File StreamSocket(int family) { return File(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

// Returns a socket that is bound to all addresses: IPv6 and IPv4 if this host has IPv6, else only IPv4.
File BoundToAnyAddress() {
  if (File file = StreamSocket(AF_INET6); file.is_open()) {
    const int no = 0;
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_addr = in6addr_any;
    if (setsockopt(file.number(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no) == 0 &&
        bind(file.number(), reinterpret_cast<sockaddr*>(&any), sizeof any) == 0)
      return file;
  }
  File file = StreamSocket(AF_INET);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  if (!file.is_open() || bind(file.number(), reinterpret_cast<sockaddr*>(&any), sizeof any) != 0) Throw("bind");
  return file;
}

std::uint16_t PortOf(int number) {
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (getsockname(number, reinterpret_cast<sockaddr*>(&bound), &length) != 0) Throw("getsockname");
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(bound).sin_port);
}

// Waits for one of the events on a file, at most for `timeout`. Returns true if one came. Signals do not end the wait.
bool Await(int number, short events, std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + timeout;
  while (true) {
    pollfd file{number, events, 0};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    const int ready = poll(&file, 1, static_cast<int>(std::max<std::chrono::milliseconds::rep>(left.count(), 0)));
    if (ready >= 0 || errno != EINTR) return ready == 1;
  }
}

}  // namespace

File::File(int number) : number_(number) {
  if (number >= 0) OpenFiles::All().Add(number);
}

File::~File() {
  if (number_ >= 0) OpenFiles::All().Close(number_);
}

Connection::Connection(File file) : file_(std::move(file)) {
  const int yes = 1;
  setsockopt(number(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  // Makes TCP resend lost data at constant short intervals. Otherwise the intervals would double, and no heartbeat
  // might come for twice the time that the network was down.
  setsockopt(number(), IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &yes, sizeof yes);
}

Connection::~Connection() {
  if (file_.is_open()) shutdown(number(), SHUT_RDWR);
}

void Connection::Send(std::string_view word) {
  unsent_.erase(0, Put(unsent_));
  if (!unsent_.empty()) return;
  const std::size_t sent = Put(word);
  if (sent > 0) unsent_ = word.substr(sent);
}

std::size_t Connection::Put(std::string_view bytes) const {
  if (bytes.empty()) return 0;
  const ssize_t sent = send(number(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  return sent < 0 ? 0 : static_cast<std::size_t>(sent);
}

Connection::Received Connection::Receive() const {
  Received received;
  received.bytes.resize(4096);
  const ssize_t count = recv(number(), received.bytes.data(), received.bytes.size(), MSG_DONTWAIT);
  received.bytes.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
  if (count > 0 || (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))) return received;
  // A process that ends before it has read everything resets its connections. So a reset means that the process ended.
  const bool ended = count == 0 || errno == ECONNRESET || errno == EPIPE;
  received.state = ended ? Received::State::kEnded : Received::State::kLost;
  return received;
}

void Connection::CloseSending() const { shutdown(number(), SHUT_WR); }

Listener::Listener() : file_(BoundToAnyAddress()), port_(PortOf(file_.number())) {
  if (listen(file_.number(), SOMAXCONN) != 0) Throw("listen");
}

std::optional<Connection> Listener::Accept() const {
  File file(accept4(number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!file.is_open()) return std::nullopt;
  return Connection(std::move(file));
}

std::vector<std::string> OwnAddresses() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) Throw("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> guard(first, &freeifaddrs);
  std::vector<std::string> addresses, loopback;
  for (const ifaddrs* own = first; own != nullptr; own = own->ifa_next) {
    if (own->ifa_addr == nullptr || (own->ifa_flags & IFF_UP) == 0) continue;
    const int family = own->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    // A link-local address means nothing on another host.
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<sockaddr_in6*>(own->ifa_addr)->sin6_addr))
      continue;
    std::array<char, NI_MAXHOST> text{};
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(own->ifa_addr, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) continue;
    ((own->ifa_flags & IFF_LOOPBACK) != 0 ? loopback : addresses).emplace_back(text.data());
  }
  addresses.insert(addresses.end(), loopback.begin(), loopback.end());
  return addresses;
}

std::optional<Connection> Connect(const std::string& address, std::uint16_t port, std::chrono::milliseconds timeout) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> guard(found, &freeaddrinfo);
  File file = StreamSocket(found->ai_family);
  if (!file.is_open()) return std::nullopt;
  if (connect(file.number(), found->ai_addr, found->ai_addrlen) != 0) {
    if (errno != EINPROGRESS || !IsWritable(file.number(), timeout)) return std::nullopt;
    int error = 0;
    socklen_t length = sizeof error;
    if (getsockopt(file.number(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) return std::nullopt;
  }
  return Connection(std::move(file));
}

std::string RandomText(std::size_t count) {
  std::string text(count, '\0');
  if (getrandom(text.data(), count, 0) != static_cast<ssize_t>(count)) Throw("getrandom");
  for (char& character : text) character = static_cast<char>('0' + (character & 63));
  return text;
}

bool IsReadable(int number, std::chrono::milliseconds timeout) { return Await(number, POLLIN, timeout); }

bool IsWritable(int number, std::chrono::milliseconds timeout) { return Await(number, POLLOUT, timeout); }

}  // namespace horovod_partial::heartbeat
