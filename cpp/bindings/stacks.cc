#include "bindings/stacks.h"

#include <Python.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <future>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/values/types.h"

namespace horovod_partial {
namespace {

constexpr unsigned kCloseOnExec = 1;  // the value of MFD_CLOEXEC, which older headers do not define

bool HasHandler(int signal) {
  struct sigaction action{};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_DFL;
}

// Returns the highest unused real-time signal, because programs and libraries use the lowest ones first.
int HighestUnusedSignal() {
  for (int signal = SIGRTMAX; signal >= SIGRTMIN; --signal)
    if (!HasHandler(signal)) return signal;
  return 0;
}

// While an object of this class lives, a helper thread holds the interpreter's lock, if it got the lock in time. So no
// thread runs Python code. Running code would change a stack while the stack is read.
class Stillness : private NonCopyable {
 public:
  Stillness() {
    if (Py_IsInitialized() == 0) return;
    try {
      std::thread([state = state_] {
        const PyGILState_STATE python = PyGILState_Ensure();
        state->holds.set_value();
        state->over.get_future().wait();
        PyGILState_Release(python);
      }).detach();
    } catch (const std::system_error&) {  // no more threads: the stacks are read without the interpreter's lock
      return;
    }
    state_->holds.get_future().wait_for(kPatience);
  }
  ~Stillness() { state_->over.set_value(); }

 private:
  // The longest wait for the interpreter's lock. A thread that holds it longer runs C code, and keeps its Python stack.
  static constexpr std::chrono::milliseconds kPatience{500};

  struct State {
    std::promise<void> holds;  // kept when the helper thread holds the interpreter's lock
    std::promise<void> over;   // kept when the helper thread must release it
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace

std::pair<int, int> PrepareStacks() {
  static const int file = static_cast<int>(syscall(SYS_memfd_create, "stacks", kCloseOnExec));
  static const int signal = file < 0 ? 0 : HighestUnusedSignal();
  return {signal, file};
}

std::string TakeStacks() {
  static auto* mutex = new std::mutex;  // lets one thread at a time use the file of stacks
  std::lock_guard<std::mutex> lock(*mutex);
  const auto [signal, file] = PrepareStacks();
  if (signal == 0 || !HasHandler(signal)) return "";  // without a handler the signal would end the process
  if (ftruncate(file, 0) != 0 || lseek(file, 0, SEEK_SET) != 0) return "";
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  {
    const Stillness stillness;
    pthread_kill(pthread_self(), signal);  // the signal handler runs before this call returns
  }
  std::string stacks;
  std::array<char, 4096> piece{};
  lseek(file, 0, SEEK_SET);
  for (ssize_t count = 0; (count = read(file, piece.data(), piece.size())) > 0;)
    stacks.append(piece.data(), static_cast<std::size_t>(count));
  if (!stacks.empty() && stacks.back() == '\n') stacks.pop_back();
  return stacks;
}

}  // namespace horovod_partial
