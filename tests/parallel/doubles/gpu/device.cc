// In place of cpp/attach/device.cc: the double of a GPU, device 0. A bucket's memory there is the host's, so that
// Horovod can reduce it; what a kernel queues on TensorFlow's stream is done in its own time. PyTorch, which has no
// stream here, gets one on which nothing but events stand, each there after a while.
#include "attach/device.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "harness/fake_stream.h"

namespace horovod_partial::attach {
namespace {

std::atomic<bool> has_memory{true};
std::atomic<int> waits{0};  // of the host, for the stream

class DoubleMemory final : public HostAddressable {
 public:
  int device() const override { return 0; }
  void* Allocate(std::size_t bytes) override {
    if (has_memory) return Host().Allocate(bytes);
    throw std::bad_alloc();
  }
  void Free(void* data) override { Host().Free(data); }
};

class DoubleEvent final : public ReadyEvent {
 public:
  explicit DoubleEvent(test::FakeStream& stream) : stream_(stream), number_(stream.Queue([] {})) {}
  bool Ready() const override { return stream_.Done(number_); }

 private:
  const test::FakeStream& stream_;
  const std::uint64_t number_;
};

class OnDouble final : public Stream {
 public:
  explicit OnDouble(test::FakeStream& stream) : stream_(stream) {}
  int device() const override { return 0; }
  void Copy(void* target, const void* source, std::size_t bytes) const override {
    stream_.Queue([=] { std::memcpy(target, source, bytes); });
  }
  void Zero(void* data, std::size_t bytes) const override {
    stream_.Queue([=] { std::memset(data, 0, bytes); });
  }
  std::shared_ptr<ReadyEvent> Record() const override { return std::make_shared<DoubleEvent>(stream_); }
  void Synchronize() const override {
    ++waits;
    stream_.WaitForAll();
  }

 private:
  test::FakeStream& stream_;
};

// TensorFlow's stream, or else one for PyTorch, which lives as long as the process too.
test::FakeStream& OnlyStream() {
  static auto* const own = new test::FakeStream;
  static const auto stream = [] {
    void* const plugin = dlopen(std::getenv("TF_PLUGGABLE_DEVICE_LIBRARY_PATH"), RTLD_NOW | RTLD_NOLOAD);
    void* const found = plugin == nullptr ? nullptr : dlsym(plugin, "double_stream");
    return reinterpret_cast<test::FakeStream* (*)()>(found);
  }();
  return stream == nullptr ? *own : *stream();
}

}  // namespace

Memory& MemoryOf(int device) {
  static auto* memory = new DoubleMemory;  // buffers may outlive static objects
  if (device == Memory::kHost) return Memory::Host();
  return *memory;
}

Memory& SpareMemoryOf(int) { return Memory::Host(); }

int DefaultDevice(int) { return 0; }

std::unique_ptr<Stream> StreamOf(int device, std::uintptr_t) {
  if (device == Memory::kHost) return std::make_unique<HostStream>();
  return std::make_unique<OnDouble>(OnlyStream());
}

}  // namespace horovod_partial::attach

// For tests: from now on it has no memory left, or has some again.
extern "C" void double_has_memory(bool has) { horovod_partial::attach::has_memory = has; }

// For tests: how often the host has waited for the stream so far.
extern "C" int double_waits() { return horovod_partial::attach::waits; }

// For tests: queues work that takes so long.
extern "C" void double_computes(double seconds) {
  horovod_partial::attach::OnlyStream().Queue(
      [=] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
}
