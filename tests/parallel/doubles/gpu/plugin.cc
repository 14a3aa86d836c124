// A double of a GPU for TensorFlow, which takes it for one: a pluggable device whose memory is the host's and whose
// streams are threads.
#include <tensorflow/c/experimental/stream_executor/stream_executor.h>
#include <tensorflow/c/tf_status.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "harness/fake_stream.h"

struct SP_Stream_st {
  horovod_partial::test::FakeStream stream;
};

struct SP_Event_st {
  std::mutex mutex;  // guards what follows
  horovod_partial::test::FakeStream* stream = nullptr;
  std::uint64_t number = 0;
};

struct SP_Timer_st {};

namespace {

constexpr std::int64_t kBytes = 1 << 30;
std::atomic<SP_Stream> first_stream{nullptr};  // on which TensorFlow computes; the next ones are for copies
constexpr int kNotANumber = 0xFF;              // four or two of these bytes are a float that is none

void Queue(SP_Stream stream, std::function<void()> work) { stream->stream.Queue(std::move(work)); }

void WaitForAll(SP_Stream stream) { stream->stream.WaitForAll(); }

// Where an event stands: what was queued when it was recorded.
struct Position {
  horovod_partial::test::FakeStream* stream;
  std::uint64_t number;
};

Position Recorded(SP_Event event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return {event->stream, event->number};
}

void Wait(const Position& position) {
  if (position.stream != nullptr) position.stream->Wait(position.number);
}

void* Allocate(const SP_Device*, std::uint64_t bytes) {
  constexpr std::size_t kAlignment = 256;
  void* const memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  std::memset(memory, kNotANumber, bytes);
  return memory;
}

void FillExecutor(SP_StreamExecutor& executor) {
  executor.allocate = [](const SP_Device* device, std::uint64_t bytes, std::int64_t, SP_DeviceMemoryBase* memory) {
    memory->opaque = Allocate(device, bytes);
    memory->size = bytes;
  };
  executor.deallocate = [](const SP_Device*, SP_DeviceMemoryBase* memory) { std::free(memory->opaque); };
  executor.host_memory_allocate = Allocate;
  executor.host_memory_deallocate = [](const SP_Device*, void* memory) { std::free(memory); };
  executor.get_allocator_stats = [](const SP_Device*, SP_AllocatorStats*) -> TF_Bool { return 0; };
  executor.device_memory_usage = [](const SP_Device*, std::int64_t* free, std::int64_t* total) -> TF_Bool {
    *free = *total = kBytes;
    return 1;
  };

  executor.create_stream = [](const SP_Device*, SP_Stream* stream, TF_Status*) {
    *stream = new SP_Stream_st;
    SP_Stream none = nullptr;
    first_stream.compare_exchange_strong(none, *stream);
  };
  executor.destroy_stream = [](const SP_Device*, SP_Stream stream) { delete stream; };
  executor.create_stream_dependency = [](const SP_Device*, SP_Stream dependent, SP_Stream other, TF_Status*) {
    Queue(dependent, [position = Position{&other->stream, other->stream.queued()}] { Wait(position); });
  };
  executor.get_stream_status = [](const SP_Device*, SP_Stream, TF_Status*) {};
  executor.block_host_until_done = [](const SP_Device*, SP_Stream stream, TF_Status*) { WaitForAll(stream); };
  executor.synchronize_all_activity = [](const SP_Device*, TF_Status*) {};
  executor.host_callback = [](const SP_Device*, SP_Stream stream, SE_StatusCallbackFn callback,
                              void* argument) -> TF_Bool {
    Queue(stream, [callback, argument] {
      TF_Status* const status = TF_NewStatus();
      callback(argument, status);
      TF_DeleteStatus(status);
    });
    return 1;
  };

  executor.create_event = [](const SP_Device*, SP_Event* event, TF_Status*) { *event = new SP_Event_st; };
  executor.destroy_event = [](const SP_Device*, SP_Event event) { delete event; };
  executor.get_event_status = [](const SP_Device*, SP_Event event) {
    const Position position = Recorded(event);
    const bool pending = position.stream != nullptr && !position.stream->Done(position.number);
    return pending ? SE_EVENT_PENDING : SE_EVENT_COMPLETE;
  };
  executor.record_event = [](const SP_Device*, SP_Stream stream, SP_Event event, TF_Status*) {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->stream = &stream->stream;
    event->number = stream->stream.queued();
  };
  executor.wait_for_event = [](const SP_Device* const, SP_Stream stream, SP_Event event, TF_Status* const) {
    Queue(stream, [position = Recorded(event)] { Wait(position); });
  };
  executor.block_host_for_event = [](const SP_Device*, SP_Event event, TF_Status*) { Wait(Recorded(event)); };

  executor.create_timer = [](const SP_Device*, SP_Timer* timer, TF_Status*) { *timer = new SP_Timer_st; };
  executor.destroy_timer = [](const SP_Device*, SP_Timer timer) { delete timer; };
  executor.start_timer = [](const SP_Device*, SP_Stream, SP_Timer, TF_Status*) {};
  executor.stop_timer = [](const SP_Device*, SP_Stream, SP_Timer, TF_Status*) {};

  executor.memcpy_dtoh = [](const SP_Device*, SP_Stream stream, void* target, const SP_DeviceMemoryBase* source,
                            std::uint64_t bytes, TF_Status*) {
    Queue(stream, [target, from = source->opaque, bytes] { std::memcpy(target, from, bytes); });
  };
  executor.memcpy_htod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* target, const void* source,
                            std::uint64_t bytes, TF_Status*) {
    Queue(stream, [to = target->opaque, source, bytes] { std::memcpy(to, source, bytes); });
  };
  executor.memcpy_dtod = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* target,
                            const SP_DeviceMemoryBase* source, std::uint64_t bytes, TF_Status*) {
    Queue(stream, [to = target->opaque, from = source->opaque, bytes] { std::memcpy(to, from, bytes); });
  };
  executor.sync_memcpy_dtoh = [](const SP_Device*, void* target, const SP_DeviceMemoryBase* source, std::uint64_t bytes,
                                 TF_Status*) { std::memcpy(target, source->opaque, bytes); };
  executor.sync_memcpy_htod = [](const SP_Device*, SP_DeviceMemoryBase* target, const void* source, std::uint64_t bytes,
                                 TF_Status*) { std::memcpy(target->opaque, source, bytes); };
  executor.sync_memcpy_dtod = [](const SP_Device*, SP_DeviceMemoryBase* target, const SP_DeviceMemoryBase* source,
                                 std::uint64_t bytes,
                                 TF_Status*) { std::memcpy(target->opaque, source->opaque, bytes); };
  executor.mem_zero = [](const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* target, std::uint64_t bytes,
                         TF_Status*) { Queue(stream, [to = target->opaque, bytes] { std::memset(to, 0, bytes); }); };
  // Asked for, and not called by TensorFlow's own kernels.
  executor.memset = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase*, std::uint8_t, std::uint64_t, TF_Status*) {
    std::abort();
  };
  executor.memset32 = [](const SP_Device*, SP_Stream, SP_DeviceMemoryBase*, std::uint32_t, std::uint64_t, TF_Status*) {
    std::abort();
  };
}

void FillPlatform(SP_PlatformFns& platform) {
  platform.get_device_count = [](const SP_Platform*, int* count, TF_Status*) { *count = 1; };
  platform.create_device = [](const SP_Platform*, SE_CreateDeviceParams* params, TF_Status*) {
    params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    params->device->hardware_name = "a double";
  };
  platform.destroy_device = [](const SP_Platform*, SP_Device*) {};
  platform.create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status*) {
    params->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
  };
  platform.destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  platform.create_stream_executor = [](const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status*) {
    params->stream_executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
    FillExecutor(*params->stream_executor);
  };
  platform.destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  platform.create_timer_fns = [](const SP_Platform*, SP_TimerFns* timer, TF_Status*) {
    timer->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
    timer->nanoseconds = [](SP_Timer) -> std::uint64_t { return 0; };
  };
  platform.destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// For the other part of the double: TensorFlow does not tell kernels which stream of a plugin theirs is.
EXPORTED horovod_partial::test::FakeStream* double_stream() { return &first_stream.load()->stream; }

// For TensorFlow.
EXPORTED void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  params->struct_size = SE_PLATFORM_REGISTRATION_PARAMS_STRUCT_SIZE;
  params->major_version = SE_MAJOR;
  params->minor_version = SE_MINOR;
  params->patch_version = SE_PATCH;
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "DOUBLE";
  params->platform->type = "GPU";
  params->platform->use_bfc_allocator = 1;
  params->platform->force_memory_growth = 1;
  params->platform_fns->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  FillPlatform(*params->platform_fns);
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
}
