// Memory and streams of CUDA devices, and events of these streams. Compiled only if Horovod has CUDA.
#include "core/values/memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "attach/cuda/kernels.h"
#include "attach/device.h"
#include "core/values/types.h"

namespace horovod_partial::attach {
namespace {

void Check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

// Returns a function of CUDA's driver. We do not link to the driver, because machines without a GPU do not have it.
template <class Function>
Function* DriverFunction(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  Check(cudaGetDriverEntryPointByVersion(name, &address, CUDART_VERSION, cudaEnableDefault, &result));
#else
  Check(cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &result));
#endif
  if (result != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("CUDA's driver has no ") + name);
  return reinterpret_cast<Function*>(address);
}

void CheckDriver(CUresult result) {
  if (result != CUDA_SUCCESS) throw std::runtime_error("CUDA's driver: error " + std::to_string(result));
}

// Retains the CUDA context that all frameworks use on a device. It is never released.
CUcontext RetainContext(int device) {
  static auto* const retain = DriverFunction<decltype(cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain");
  CUcontext context = nullptr;
  CheckDriver(retain(&context, device));
  return context;
}

// While a guard lives, this thread works on the guard's device: the context of the device is on top of the thread's
// stack of contexts. cudaSetDevice is not used: a thread without a context could get its old state back only by
// cudaSetDevice(0), which makes a context on device 0. A context takes half a gigabyte of the GPU in each process.
//
// While the application captures a CUDA graph, CUDA refuses calls of any thread if they might belong to the graph. Our
// calls never do, and the capture mode `relaxed` says so. Without it CudaReadyEvent::Ready would wrongly return true.
class ContextGuard : private NonCopyable {
 public:
  explicit ContextGuard(CUcontext context) {
    static auto* const push = DriverFunction<decltype(cuCtxPushCurrent)>("cuCtxPushCurrent");
    CheckDriver(push(context));
    cudaThreadExchangeStreamCaptureMode(&capture_mode_);
  }
  ~ContextGuard() {
    cudaThreadExchangeStreamCaptureMode(&capture_mode_);
    static auto* const pop = DriverFunction<decltype(cuCtxPopCurrent)>("cuCtxPopCurrent");
    CUcontext context = nullptr;
    pop(&context);
  }

 private:
  // After construction this is the capture mode that the thread had before.
  cudaStreamCaptureMode capture_mode_ = cudaStreamCaptureModeRelaxed;
};

// Frees something in a destructor. Ignores errors, because the device's context may be gone when the process ends.
template <class Operation>
void GiveBack(CUcontext context, const Operation& operation) {
  try {
    const ContextGuard guard(context);
    operation();
  } catch (const std::exception&) {
  }
}

class OutOfMemory final : public std::bad_alloc {
 public:
  OutOfMemory(int device, std::size_t bytes)
      : text_("GPU " + std::to_string(device) + " has no " + std::to_string(bytes) +
              " bytes left for gradients that came late; leave room for them, in PyTorch by "
              "torch.cuda.set_per_process_memory_fraction") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  const std::string text_;
};

// The memory of a GPU. All operations use one stream, and each call waits until its own work is done. Operations of
// several threads may interleave on the stream.
//
// Memory comes from a pool of CUDA's, which keeps freed memory for later. cudaMalloc would wait for everything that is
// queued on the device. A framework's allocator would make the background thread wait for Python's interpreter.
class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(int device) : device_(device), context_(RetainContext(device)) {
    const ContextGuard guard(context_);
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, device};
    Check(cudaMemPoolCreate(&pool_, &properties));
    std::uint64_t kept = std::numeric_limits<std::uint64_t>::max();
    Check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &kept));
    Check(cudaMallocHost(reinterpret_cast<void**>(&answer_), sizeof *answer_));
    found_ = static_cast<int*>(Allocate(sizeof *found_));
  }

  int device() const override { return device_; }
  CUcontext context() const { return context_; }

  void* Allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    const ContextGuard guard(context_);
    void* data = nullptr;
    cudaError_t error = cudaMallocFromPoolAsync(&data, bytes, pool_, stream_);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();           // clears the error, else this thread's next kernel seems to fail
      cudaMemPoolTrimTo(pool_, 0);  // frees the memory that the pool keeps, because its pieces may be too small
      error = cudaMallocFromPoolAsync(&data, bytes, pool_, stream_);
    }
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw OutOfMemory(device_, bytes);
    }
    Check(error);
    Check(cudaStreamSynchronize(stream_));  // makes the memory usable on any stream
    return data;
  }
  // No work on the device uses the memory at this call, because Horovod calls back only when a reduction has ended.
  void Free(void* data) override {
    if (data != nullptr) GiveBack(context_, [&] { cudaFreeAsync(data, stream_); });
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
  bool AddIfFinite(DataType type, void* target, const void* source, std::size_t elements, bool first) override {
    std::lock_guard<std::mutex> lock(found_mutex_);
    Run([&] {
      Check(cudaMemsetAsync(found_, 0, sizeof *found_, stream_));
      QueueFindNonFinite(type, source, elements, found_, stream_);
      QueueAddUnless(found_, type, target, source, elements, first, stream_);
      Check(cudaMemcpyAsync(answer_, found_, sizeof *answer_, cudaMemcpyDeviceToHost, stream_));
    });
    return *answer_ == 0;
  }

 private:
  template <class Operation>
  void Run(const Operation& operation) {
    const ContextGuard guard(context_);
    operation();
    Check(cudaStreamSynchronize(stream_));
  }

  const int device_;
  const CUcontext context_;
  cudaStream_t stream_{};
  cudaMemPool_t pool_{};
  std::mutex found_mutex_;  // guards what AddIfFinite finds: found_ on the device, answer_ on the host
  int* found_ = nullptr;
  int* answer_ = nullptr;
};

// Pinned memory of the host, which NCCL's kernels can read and write like memory of a device.
class PinnedMemory final : public HostAddressable {
 public:
  explicit PinnedMemory(int device) : device_(device), context_(RetainContext(device)) {}

  int device() const override { return device_; }
  void* Allocate(std::size_t bytes) override {
    if (bytes == 0) return nullptr;
    const ContextGuard guard(context_);
    void* data = nullptr;
    if (cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped) == cudaSuccess) return data;
    cudaGetLastError();
    throw OutOfMemory(device_, bytes);
  }
  void Free(void* data) override {
    if (data != nullptr) GiveBack(context_, [&] { cudaFreeHost(data); });
  }

 private:
  const int device_;
  const CUcontext context_;
};

template <class Kind>
Kind& OneOfEach(int device) {
  static std::mutex mutex;                                           // guards the map of memories
  static auto* memories = new std::map<int, std::unique_ptr<Kind>>;  // never freed: buffers may need a memory at exit
  std::lock_guard<std::mutex> lock(mutex);
  auto& memory = (*memories)[device];
  if (memory == nullptr) memory = std::make_unique<Kind>(device);
  return *memory;
}

// An event that comes when all work that is queued on `stream` now is done.
class CudaReadyEvent final : public ReadyEvent, private NonCopyable {
 public:
  CudaReadyEvent(CUcontext context, cudaStream_t stream) : context_(context) {
    const ContextGuard guard(context_);
    Check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    if (const cudaError_t error = cudaEventRecord(event_, stream); error != cudaSuccess) {
      cudaEventDestroy(event_);
      Check(error);
    }
  }
  ~CudaReadyEvent() override {
    GiveBack(context_, [&] { cudaEventDestroy(event_); });
  }

  // Returns true after an error on the device, too. The event will not come then, and the reduction reports the error.
  bool Ready() const override {
    const ContextGuard guard(context_);
    const bool ready = cudaEventQuery(event_) != cudaErrorNotReady;
    cudaGetLastError();  // clears "not ready", which else stays this thread's last error
    return ready;
  }

 private:
  const CUcontext context_;
  cudaEvent_t event_{};
};

// A stream that a framework uses on a CUDA device.
class CudaStream final : public Stream {
 public:
  CudaStream(int device, std::uintptr_t handle)
      : device_(device),
        stream_(reinterpret_cast<cudaStream_t>(handle)),
        context_(OneOfEach<CudaMemory>(device).context()) {}

  int device() const override { return device_; }
  void Copy(void* target, const void* source, std::size_t bytes) const override {
    Run([&](cudaStream_t stream) { return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream); });
  }
  void Zero(void* data, std::size_t bytes) const override {
    Run([&](cudaStream_t stream) { return cudaMemsetAsync(data, 0, bytes, stream); });
  }
  std::shared_ptr<ReadyEvent> Record() const override { return std::make_shared<CudaReadyEvent>(context_, stream_); }
  void Synchronize() const override { Run(cudaStreamSynchronize); }

 private:
  template <class Operation>
  void Run(const Operation& operation) const {
    const ContextGuard guard(context_);
    Check(operation(stream_));
  }

  const int device_;
  const cudaStream_t stream_;
  const CUcontext context_;
};

}  // namespace

// The memory of a device is never destroyed.
Memory& MemoryOf(int device) { return device == Memory::kHost ? Memory::Host() : OneOfEach<CudaMemory>(device); }

Memory& SpareMemoryOf(int device) { return device == Memory::kHost ? Memory::Host() : OneOfEach<PinnedMemory>(device); }

// Makes no CUDA context.
int DefaultDevice(int local_rank) {
  int count = 0;
  Check(cudaGetDeviceCount(&count));
  return local_rank % count;
}

std::unique_ptr<Stream> StreamOf(int device, std::uintptr_t handle) {
  if (device == Memory::kHost) return std::make_unique<HostStream>();
  return std::make_unique<CudaStream>(device, handle);
}

}  // namespace horovod_partial::attach
