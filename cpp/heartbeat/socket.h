// Non-blocking TCP for heartbeats.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace horovod_partial::heartbeat {

// A file descriptor that is closed when this object is destroyed. A forked process closes its copy at once. Otherwise a
// child process that outlives its parent would keep the parent's connections open.
class File {
 public:
  explicit File(int number = -1);
  File(File&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  ~File();

  int number() const { return number_; }
  bool is_open() const { return number_ >= 0; }

 private:
  int number_;
};

// A connection. It drops a message that it cannot begin to send at once, because another heartbeat follows anyway.
class Connection {
 public:
  explicit Connection(File file);
  Connection(Connection&&) = default;
  ~Connection();

  int number() const { return file_.number(); }
  void Send(std::string_view word);
  struct Received {
    enum class State {
      kOpen,
      kEnded,  // the process at the other end has ended, or sends no more
      kLost,   // the network between both ends has failed
    };
    State state = State::kOpen;
    std::string bytes;  // the bytes that have come, at most 4 KiB
  };
  // Returns the bytes that have come, and whether the connection is still open. Does not wait.
  Received Receive() const;
  // Ends sending. The other end receives kEnded when it has read everything.
  void CloseSending() const;

 private:
  std::size_t Put(std::string_view bytes) const;

  File file_;
  std::string unsent_;  // the rest of a message whose beginning was sent
};

// Listens on a port that the system chooses, on all addresses of this host.
class Listener {
 public:
  // Throws std::system_error if it cannot listen.
  Listener();

  int number() const { return file_.number(); }
  std::uint16_t port() const { return port_; }
  // Returns a new connection, or nothing if none has come or this process may open no more files.
  std::optional<Connection> Accept() const;

 private:
  File file_;
  std::uint16_t port_;
};

// Returns the addresses of this host as text: first those that other hosts may reach, then its loopback addresses.
std::vector<std::string> OwnAddresses();

// Connects to `port` at `address`. Returns nothing if no connection is made in time.
std::optional<Connection> Connect(const std::string& address, std::uint16_t port, std::chrono::milliseconds timeout);

// Returns random characters, of 64 printable ones without a space.
std::string RandomText(std::size_t count);

// IsReadable and IsWritable wait for at most `timeout`. IsReadable returns true if there is something to read, or if
// the other end has closed. IsWritable returns true if something can be written.
bool IsReadable(int number, std::chrono::milliseconds timeout);
bool IsWritable(int number, std::chrono::milliseconds timeout);

}  // namespace horovod_partial::heartbeat
