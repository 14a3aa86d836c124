// TCP without waiting, as far as signs of life need it.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace horovod_partial::heartbeat {

// An open file that is closed with its owner, and at once in a forked process: a child that lives on would keep the
// connections of a process that has ended.
class File {
 public:
  explicit File(int number = -1);
  File(File&& other) noexcept : number_(other.Release()) {}
  File& operator=(File&& other) noexcept;
  ~File();

  int number() const { return number_; }
  bool is_open() const { return number_ >= 0; }

 private:
  int Release();

  int number_;
};

// A connection. What cannot be sent at once is dropped, as a whole: signs of life go on.
class Connection {
 public:
  explicit Connection(File file);
  Connection(Connection&&) = default;
  Connection& operator=(Connection&&) = default;
  ~Connection();

  int number() const { return file_.number(); }
  void Send(std::string_view word);
  struct Received {
    enum class State {
      kOpen,
      kEnded,  // the process at the other end has ended, or wants no more
      kLost,   // the way there is
    };
    State state = State::kOpen;
    std::string bytes;  // at most 4 KiB
  };
  // What has come.
  Received Receive() const;
  // Nothing is sent any more; the other end sees that when it has read all.
  void CloseSending() const;

 private:
  std::size_t Put(std::string_view bytes) const;

  File file_;
  std::string unsent_;  // the rest of a word that has been begun
};

// Listens on a port of its own on all addresses of this host.
class Listener {
 public:
  // Throws std::system_error.
  Listener();

  int number() const { return file_.number(); }
  std::uint16_t port() const { return port_; }
  // A new connection, if one has come and this process may have one more open file.
  std::optional<Connection> Accept() const;

 private:
  File file_;
  std::uint16_t port_;
};

// The addresses at which other hosts may reach this one, and then its loopback, as text.
std::vector<std::string> OwnAddresses();

// Nothing if nobody answers there in time.
std::optional<Connection> Connect(const std::string& address, std::uint16_t port, std::chrono::milliseconds timeout);

// Random bytes that nobody can guess.
std::string RandomBytes(std::size_t count);

// Whether there is something to read, or the other end is closed, before so much time is over; and whether something
// can be written.
bool IsReadable(int number, std::chrono::milliseconds timeout);
bool IsWritable(int number, std::chrono::milliseconds timeout);

}  // namespace horovod_partial::heartbeat
