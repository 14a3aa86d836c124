#include "attach/cuda/memory.h"

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "attach/cuda/kernels.h"

namespace horovod_partial::attach {
namespace {

void Check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

// The device of this thread, until the guard goes: Horovod's and the application's threads have their own choices.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    Check(cudaGetDevice(&before_));
    Check(cudaSetDevice(device));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

// One stream for all operations; each waits for its end. Operations of several threads may interleave on it.
class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(int device) : device_(device) {
    const DeviceGuard guard(device_);
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }

  int device() const override { return device_; }

  void* Allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    const DeviceGuard guard(device_);
    void* data = nullptr;
    if (cudaMalloc(&data, bytes) != cudaSuccess) throw std::bad_alloc();
    return data;
  }
  void Free(void* data) override {
    if (data != nullptr) cudaFree(data);  // fails when the process ends, and the device's context has gone before
  }
  void Copy(void* target, const void* source, std::size_t bytes) override {
    Run([&] { Check(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream_)); });
  }
  void Zero(void* data, std::size_t bytes) override {
    Run([&] { Check(cudaMemsetAsync(data, 0, bytes, stream_)); });
  }
  void Add(DataType type, void* target, const void* source, std::size_t elements) override {
    Run([&] { QueueAdd(type, target, source, elements, stream_); });
  }
  void Scale(DataType type, void* data, std::size_t elements, double factor) override {
    Run([&] { QueueScale(type, data, elements, factor, stream_); });
  }
  bool AllFinite(DataType type, const void* data, std::size_t elements) override {
    std::lock_guard<std::mutex> lock(found_mutex_);
    if (found_ == nullptr) found_ = static_cast<int*>(Allocate(sizeof(int)));
    int found = 0;
    Run([&] {
      Check(cudaMemsetAsync(found_, 0, sizeof found, stream_));
      QueueFindNonFinite(type, data, elements, found_, stream_);
      Check(cudaMemcpyAsync(&found, found_, sizeof found, cudaMemcpyDeviceToHost, stream_));
    });
    return found == 0;
  }

 private:
  template <class Operation>
  void Run(const Operation& operation) {
    const DeviceGuard guard(device_);
    operation();
    Check(cudaStreamSynchronize(stream_));
  }

  const int device_;
  cudaStream_t stream_{};
  std::mutex found_mutex_;  // guards the number, on the device, that AllFinite asks for
  int* found_ = nullptr;
};

}  // namespace

Memory& CudaMemoryOf(int device) {
  static std::mutex mutex;                                                 // guards the map
  static auto* memories = new std::map<int, std::unique_ptr<CudaMemory>>;  // buffers may outlive static objects
  std::lock_guard<std::mutex> lock(mutex);
  auto& memory = (*memories)[device];
  if (memory == nullptr) memory = std::make_unique<CudaMemory>(device);
  return *memory;
}

CudaReadyEvent::CudaReadyEvent(int device, std::uintptr_t stream) {
  const DeviceGuard guard(device);
  Check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  if (const cudaError_t error = cudaEventRecord(event_, reinterpret_cast<cudaStream_t>(stream)); error != cudaSuccess) {
    cudaEventDestroy(event_);
    Check(error);
  }
}

CudaReadyEvent::~CudaReadyEvent() { cudaEventDestroy(event_); }

// After an error on the device there is nothing to wait for: the reduction will meet it.
bool CudaReadyEvent::Ready() const {
  const bool ready = cudaEventQuery(event_) != cudaErrorNotReady;
  cudaGetLastError();  // "not ready" would stay as this thread's last error
  return ready;
}

}  // namespace horovod_partial::attach
