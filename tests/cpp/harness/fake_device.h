// A make-believe device: memory of its own, a stream that is a thread, events, an allocator that fails on demand.
//
// Its addresses cannot be read or written by the host, which the system ends where it tries: the same pages are mapped
// twice, and only the device's own operations use the second mapping. They run on the stream's thread, each after a
// delay that is drawn from a seed, so that an operation whose end nobody waited for is noticed. What they touch must be
// allocated, and what is not written yet, or no longer allocated, is not a number.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/values/dtype.h"
#include "core/values/memory.h"
#include "core/values/types.h"
#include "harness/fake_stream.h"

namespace horovod_partial::test {

class FakeDevice final : public Memory {
 public:
  // Without a stream operations run at once, by the thread that asks for them: for jobs that a seed repeats.
  explicit FakeDevice(int number, std::unique_ptr<FakeStream> stream = nullptr)
      : number_(number), stream_(std::move(stream)) {
    const int file = memfd_create("fake device", 0);
    if (file < 0 || ftruncate(file, kBytes) != 0) throw std::runtime_error("no memory for a fake device");
    addresses_ = static_cast<char*>(mmap(nullptr, kBytes, PROT_NONE, MAP_SHARED, file, 0));
    pages_ = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
    if (addresses_ == MAP_FAILED || pages_ == MAP_FAILED) throw std::runtime_error("no memory for a fake device");
  }
  ~FakeDevice() override {
    stream_ = nullptr;
    munmap(addresses_, kBytes);
    munmap(pages_, kBytes);
  }
  FakeDevice(const FakeDevice&) = delete;
  FakeDevice& operator=(const FakeDevice&) = delete;

  int device() const override { return number_; }

  void* Allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    if (allowed_ == 0) throw std::bad_alloc();
    if (allowed_ > 0) --allowed_;
    std::size_t begin = 0;
    for (const auto& [at, size] : used_) {
      if (begin + bytes <= at) break;
      begin = (at + size + kAlignment - 1) / kAlignment * kAlignment;
    }
    if (begin + bytes > kBytes) throw std::bad_alloc();
    used_[begin] = bytes;
    std::memset(pages_ + begin, kNotANumber, bytes);
    return addresses_ + begin;
  }
  void Free(void* data) override {
    if (data == nullptr) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = used_.find(static_cast<std::size_t>(static_cast<char*>(data) - addresses_));
    if (it == used_.end()) std::abort();  // a destructor may be calling
    std::memset(pages_ + it->first, kNotANumber, it->second);
    used_.erase(it);
  }
  void Copy(void* target, const void* source, std::size_t bytes) override {
    Run([to = Page(target, bytes), from = Page(source, bytes), bytes] { std::memcpy(to, from, bytes); });
  }
  void Zero(void* data, std::size_t bytes) override {
    Run([to = Page(data, bytes), bytes] { std::memset(to, 0, bytes); });
  }
  void Add(DataType type, void* target, const void* source, std::size_t elements) override {
    const std::size_t bytes = elements * SizeOf(type);
    Run([=, to = Page(target, bytes), from = Page(source, bytes)] { Host().Add(type, to, from, elements); });
  }
  void Scale(DataType type, void* data, std::size_t elements, double factor) override {
    Run([=, to = Page(data, elements * SizeOf(type))] { Host().Scale(type, to, elements, factor); });
  }
  bool AddIfFinite(DataType type, void* target, const void* source, std::size_t elements, bool first) override {
    const std::size_t bytes = elements * SizeOf(type);
    bool finite = false;
    Run([=, &finite, to = Page(target, bytes), from = Page(source, bytes)] {
      finite = Host().AddIfFinite(type, to, from, elements, first);
    });
    return finite;
  }

  // --- What tests do

  bool has_stream() const { return stream_ != nullptr; }
  // Until all that is queued has been done.
  void Synchronize() {
    if (stream_ != nullptr) stream_->WaitForAll();
  }
  // Stands behind what is queued on the stream, and `work`, which makes a contribution say.
  std::shared_ptr<ReadyEvent> Record(std::function<void()> work) {
    return std::make_shared<Event>(*stream_, stream_->Queue(std::move(work)));
  }
  // Where the device's own operations find what has this address. Throws if it is not allocated.
  void* Page(const void* data, std::size_t bytes) const {
    const auto offset = static_cast<std::size_t>(static_cast<const char*>(data) - addresses_);  // huge if it is below
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = used_.upper_bound(offset);
    if (it == used_.begin() || offset + bytes > std::prev(it)->first + std::prev(it)->second)
      throw std::logic_error("a device is asked for memory that is not allocated there");
    return pages_ + offset;
  }
  // So many more allocations succeed; -1 for all.
  void Allow(int allocations) {
    std::lock_guard<std::mutex> lock(mutex_);
    allowed_ = allocations;
  }
  // So many more operations succeed; -1 for all.
  void Operate(int operations) { operations_ = operations; }
  // Allocations that have not been freed.
  std::size_t used() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return used_.size();
  }

 private:
  static constexpr std::size_t kBytes = 1 << 20;
  static constexpr std::size_t kAlignment = 64;
  static constexpr int kNotANumber = 0xFF;  // four or two of these bytes are a float that is none

  class Event final : public ReadyEvent {
   public:
    Event(FakeStream& stream, std::uint64_t number) : stream_(stream), number_(number) {}
    bool Ready() const override { return stream_.Done(number_); }

   private:
    FakeStream& stream_;
    const std::uint64_t number_;
  };

  void Run(std::function<void()> work) {
    if (operations_ == 0) throw std::runtime_error("the device has failed");
    if (operations_ > 0) --operations_;
    if (stream_ == nullptr) return work();
    stream_->Wait(stream_->Queue(std::move(work)));
  }

  const int number_;
  char* addresses_ = nullptr;  // what the host knows, and cannot use
  char* pages_ = nullptr;
  mutable std::mutex mutex_;                 // guards what follows, up to the stream
  std::map<std::size_t, std::size_t> used_;  // sizes, by offset
  int allowed_ = -1;
  std::atomic<int> operations_{-1};
  std::unique_ptr<FakeStream> stream_;
};

// A device for each rank. When they go, nothing may be allocated there any more.
class FakeDevices {
 public:
  enum class Streams : std::uint8_t { kNone, kOwn };

  FakeDevices(int ranks, Streams streams) {
    for (int rank = 0; rank < ranks; ++rank)
      devices_.push_back(std::make_unique<FakeDevice>(
          rank, streams == Streams::kOwn ? std::make_unique<FakeStream>(static_cast<std::uint64_t>(rank)) : nullptr));
  }
  ~FakeDevices() {
    for (const auto& device : devices_) EXPECT_EQ(device->used(), 0u) << "on device " << device->device();
  }
  FakeDevices(const FakeDevices&) = delete;
  FakeDevices& operator=(const FakeDevices&) = delete;

  FakeDevice& operator[](Rank rank) { return *devices_.at(static_cast<std::size_t>(rank)); }

 private:
  std::vector<std::unique_ptr<FakeDevice>> devices_;
};

// Where a test finds what has this address in this memory.
inline void* View(Memory& memory, const void* data, std::size_t bytes) {
  const auto* device = dynamic_cast<FakeDevice*>(&memory);
  return device == nullptr || bytes == 0 ? const_cast<void*>(data) : device->Page(data, bytes);
}

}  // namespace horovod_partial::test
