// horovod_partial._attach: partial collectives on an installed Horovod. Frameworks pass pointers, sizes and types.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>

#include "attach/attachment.h"
#include "attach/device.h"
#include "attach/fusion.h"
#include "attach/library.h"
#include "bindings/conversions.h"
#include "bindings/monitor_calls.h"
#include "bindings/stacks.h"
#include "engine/engine.h"
#include "engine/log.h"
#include "engine/owner.h"
#include "heartbeat/monitor.h"

namespace py = pybind11;
using namespace horovod_partial;
using attach::Session;

namespace {

// While it lives, the thread of a family takes the family's results as they come, although it waits for something else.
class Draining {
 public:
  Draining(const std::string& library, std::int32_t process_set, Family family)
      : session_(attach::FindSession(library, process_set)), family_(std::move(family)) {
    if (session_ != nullptr) draining_.emplace(session_->engine(), std::vector<Family>{family_});
  }
  bool IsDue() const { return session_ != nullptr && session_->engine().IsNearlyFull(family_); }
  void End() { draining_.reset(); }

  // Returns a function that tells whether any of these families has a result that must be taken soon; null if there are
  // none.
  static Engine::IsDue Any(std::vector<const Draining*> drainings) {
    if (drainings.empty()) return nullptr;
    return [drainings = std::move(drainings)] {
      return std::any_of(drainings.begin(), drainings.end(), [](const Draining* each) { return each->IsDue(); });
    };
  }

 private:
  const std::shared_ptr<Session> session_;
  const Family family_;
  std::optional<Engine::Draining> draining_;
};

// An arrival whose result the application has not fetched yet. It keeps its session alive, but not the tensors: the
// framework must keep them until `wait` has returned.
class Handle {
 public:
  Handle(std::shared_ptr<Session> session, std::shared_ptr<SharedBucket> bucket, std::shared_ptr<Operation> operation)
      : session_(std::move(session)), bucket_(std::move(bucket)), operation_(std::move(operation)) {}

  bool Poll() const { return session_->engine().Poll(*bucket_, *operation_); }
  bool Wait(const std::vector<const Draining*>& drainings) const {
    py::gil_scoped_release release;
    return session_->engine().Wait(*bucket_, *operation_, Draining::Any(drainings));
  }
  RoundInfo Info() const {
    std::lock_guard<std::mutex> lock(bucket_->mutex);
    if (!operation_->done) throw py::value_error("the operation has not finished; synchronize it first");
    return operation_->info;
  }

 private:
  std::shared_ptr<Session> session_;
  std::shared_ptr<SharedBucket> bucket_;
  std::shared_ptr<Operation> operation_;
};

// Python's reference to an owner. The owner leaves when Python's garbage collector destroys the reference, which may
// happen in any thread and under any lock.
class OwnerReference {
 public:
  OwnerReference() = default;
  OwnerReference(const OwnerReference&) = delete;
  OwnerReference& operator=(const OwnerReference&) = delete;
  ~OwnerReference() { owner_->Leave(); }

  void Own(const std::string& library, std::int32_t process_set, const std::string& name) const {
    attach::SessionOf(library, process_set)->engine().Own(name, owner_);
  }

 private:
  const std::shared_ptr<Owner> owner_ = std::make_shared<Owner>();
};

double NowSeconds() { return std::chrono::duration<double>(Now()).count(); }

// `stream`: the device's stream in which the framework has queued the work that makes the input; 0 on the host.
Handle Submit(const std::string& library, std::int32_t process_set, const std::string& name, const BucketConfig& config,
              std::uintptr_t input, std::uintptr_t output, int work, std::uintptr_t stream) {
  py::gil_scoped_release release;
  static char nothing;  // for tensors without elements: their address may be null, which would mean no tensor at all
  const auto address = [](std::uintptr_t pointer) {
    return pointer == 0 ? &nothing : reinterpret_cast<void*>(pointer);
  };
  auto session = attach::SessionOf(library, process_set);
  auto bucket = session->engine().Declare(name, config);
  auto ready = attach::StreamOf(config.memory->device(), stream)->Record();
  auto arrived = session->engine().Arrive(bucket, {address(input), address(output), 1, work}, std::move(ready));
  return {std::move(session), std::move(bucket), std::move(arrived)};
}

void Declare(const std::string& library, std::int32_t process_set, const std::string& name,
             const BucketConfig& config) {
  py::gil_scoped_release release;
  attach::SessionOf(library, process_set)->engine().Declare(name, config);
}

// Without `waits` it does not block: it returns nothing if no micro-batch may begin now.
std::optional<std::pair<int, int>> NextMicroBatch(const std::string& library, std::int32_t process_set,
                                                  const Family& names, bool begins, bool waits,
                                                  const std::vector<const Draining*>& drainings) {
  py::gil_scoped_release release;
  const auto is_due = waits ? Draining::Any(drainings) : [] { return true; };
  return attach::SessionOf(library, process_set)->engine().NextMicroBatch(names, begins, is_due);
}

void ReturnMicroBatch(const std::string& library, std::int32_t process_set, const std::string& name) {
  py::gil_scoped_release release;
  const auto session = attach::FindSession(library, process_set);
  if (session != nullptr) session->engine().ReturnMicroBatch(name);
}

// Takes the results that this rank has missed; returns nothing if there are none. `pointer` has room for the whole
// bucket: on the bucket's device, or with `to_host` on the host.
std::optional<Handle> Collect(const std::string& library, std::int32_t process_set, const std::string& name,
                              std::uintptr_t pointer, bool to_host) {
  py::gil_scoped_release release;
  auto session = attach::FindSession(library, process_set);
  auto bucket = session == nullptr ? nullptr : session->engine().Find(name);
  if (bucket == nullptr) return std::nullopt;
  void* const target = reinterpret_cast<void*>(pointer);
  Memory& memory = *bucket->config.memory;
  Buffer there;
  if (to_host && memory.device() != Memory::kHost) there.Reserve(bucket->core.bytes(), memory);
  auto operation = session->engine().Collect(bucket, there.size() > 0 ? there.data() : target);
  if (operation == nullptr) return std::nullopt;
  if (there.size() > 0) attach::CopyToHost(memory.device(), target, there.data(), there.size());
  return Handle(std::move(session), std::move(bucket), std::move(operation));
}

// Takes the oldest round of a family that this rank can take, to the memory at `pointers`, one for each bucket. Returns
// how many gradients are in it, or nothing if there is no such round.
std::optional<int> TakeRound(const std::string& library, std::int32_t process_set, const Family& names,
                             const std::vector<std::uintptr_t>& pointers) {
  py::gil_scoped_release release;
  const auto session = attach::FindSession(library, process_set);
  if (session == nullptr) return std::nullopt;
  std::vector<Member> family;
  for (std::size_t i = 0; i < names.size(); ++i) family.push_back({names[i], reinterpret_cast<void*>(pointers.at(i))});
  const auto taken = session->engine().TakeRound(family);
  return taken ? std::optional<int>(taken->gradients) : std::nullopt;
}

bool HasRound(const std::string& library, std::int32_t process_set, const Family& names) {
  py::gil_scoped_release release;
  const auto session = attach::FindSession(library, process_set);
  return session != nullptr && session->engine().HasRound(names);
}

// A flush of a process set. It is over at once if there is no session.
class Flush {
 public:
  static std::unique_ptr<Flush> Begin(const std::string& library, std::int32_t process_set, std::vector<Family> drained,
                                      bool ends) {
    auto flush = std::make_unique<Flush>();
    flush->session_ = attach::FindSession(library, process_set);
    if (flush->session_ == nullptr) return flush;
    const auto kind = ends ? Report::Flush::kEnding : Report::Flush::kFlushing;
    flush->flushing_.emplace(flush->session_->engine(), kind, std::move(drained));
    return flush;
  }
  bool Wait(const std::vector<const Draining*>& drainings) {
    return flushing_ && flushing_->Wait(Draining::Any(drainings));
  }
  bool WasNeeded() const { return flushing_ && flushing_->was_needed(); }
  void End() { flushing_.reset(); }

 private:
  std::shared_ptr<Session> session_;
  std::optional<Engine::Flushing> flushing_;
};

// What this rank knows of a process set's buckets. Each bucket is read at another moment.
struct Snapshot {
  struct Entry {
    std::string name;
    BucketStatistics statistics;
    std::size_t bytes_held;
    bool pending;       // this rank has a late contribution to deliver
    int missed_rounds;  // on this rank
    Round completed;    // rounds that have ended on this rank
    bool unsettled;     // it has an owner, and gradients of it are pending or were missed on this rank
  };
  std::vector<Entry> buckets;
  std::map<std::string, Coordinator::Offsets> offsets;      // by bucket, on rank 0
  std::map<std::string, std::int64_t> unconnected_windows;  // by bucket, on rank 0
};

// Makes no Python object. That may collect garbage, and so run any code of the application, which may need a lock that
// is held here.
Snapshot TakeSnapshot(const std::string& library, std::int32_t process_set) {
  py::gil_scoped_release release;
  Snapshot snapshot;
  const auto session = attach::FindSession(library, process_set);
  if (session == nullptr) return snapshot;
  for (const auto& bucket : session->engine().Buckets()) {
    std::lock_guard<std::mutex> lock(bucket->mutex);
    const Bucket& core = bucket->core;
    // If late contributions are discarded, missed results do not matter: they are older models, or signals without
    // content.
    const bool misses = core.missed_gradients() > 0 && core.options().late != Late::kDiscard;
    const bool unsettled = bucket->owner != nullptr && (core.HasPending() || misses);
    snapshot.buckets.push_back({core.name(), bucket->statistics, core.held_bytes(), core.HasPending(),
                                core.missed_rounds(), core.completed(), unsettled});
  }
  snapshot.offsets = session->ArrivalOffsets();
  snapshot.unconnected_windows = session->UnconnectedWindows();
  return snapshot;
}

py::dict Statistics(const std::string& library, std::int32_t process_set) {
  const Snapshot snapshot = TakeSnapshot(library, process_set);
  py::dict result;
  for (const auto& [name, statistics, bytes_held, pending, missed_rounds, completed, unsettled] : snapshot.buckets) {
    py::dict description = Describe(statistics);
    description["waited_seconds"] = statistics.waited_seconds;
    description["groups_made"] = statistics.groups_made;
    description["setup_seconds"] = statistics.setup_seconds;
    description["dropped"] = statistics.dropped;
    description["summed"] = statistics.summed;
    description["bytes_held"] = bytes_held;
    description["pending"] = pending;
    description["missed_rounds"] = missed_rounds;
    description["completed"] = completed;
    description["unsettled"] = unsettled;
    if (const auto found = snapshot.offsets.find(name); found != snapshot.offsets.end()) {
      const Coordinator::Offsets& offsets = found->second;
      py::list means;
      for (std::size_t rank = 0; rank < offsets.count.size(); ++rank) {
        const auto count = static_cast<double>(offsets.count[rank]);
        means.append(count > 0 ? offsets.total_seconds[rank] / count : 0.0);
      }
      description["arrival_offset_seconds"] = means;
    }
    if (const auto found = snapshot.unconnected_windows.find(name); found != snapshot.unconnected_windows.end())
      description["unconnected_windows"] = found->second;
    result[py::str(name)] = description;
  }
  return result;
}

void Clear(const std::string& library, std::int32_t process_set, const Family& names) {
  py::gil_scoped_release release;
  if (const auto session = attach::FindSession(library, process_set)) session->engine().Clear(names);
}

void Claim(const std::string& library, std::int32_t process_set, const Family& names) {
  py::gil_scoped_release release;
  if (const auto session = attach::FindSession(library, process_set)) session->engine().Claim(names);
}

void Deliver(const std::string& library, std::int32_t process_set, const std::vector<Family>& families) {
  py::gil_scoped_release release;
  if (const auto session = attach::FindSession(library, process_set)) session->engine().Deliver(families);
}

// Does nothing if Horovod is down: then there is nobody to tell.
void SayFarewell(const std::string& library, const std::string& failure) {
  py::gil_scoped_release release;
  if (const auto session = attach::FindSession(library, 0)) session->engine().SayFarewell(failure);
}

}  // namespace

PYBIND11_MODULE(_attach, m) {
  m.doc() = "Partial collectives inside the coordination cycle of an installed Horovod.";
  py::register_exception<attach::AttachError>(m, "AttachError", PyExc_ImportError);
  py::register_exception<EngineError>(m, "EngineError", PyExc_RuntimeError);

  // Runs Python's signal handlers during a wait.
  attach::SetInterrupt([] {
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });

  py::class_<RoundInfo>(m, "RoundInfo")
      .def_readonly("round", &RoundInfo::round)
      .def_readonly("late", &RoundInfo::late)
      .def_readonly("fresh", &RoundInfo::fresh)
      .def_readonly("gradients", &RoundInfo::gradients)
      .def_readonly("staleness", &RoundInfo::staleness)
      .def_readonly("empty", &RoundInfo::empty)
      .def_readonly("members", &RoundInfo::members)
      .def_readonly("work", &RoundInfo::work);

  py::class_<OwnerReference>(m, "Owner")
      .def(py::init<>())
      .def("own", &OwnerReference::Own, py::call_guard<py::gil_scoped_release>(), py::arg("library"),
           py::arg("process_set"), py::arg("name"));

  py::class_<Draining>(m, "Draining")
      .def(py::init<const std::string&, std::int32_t, Family>(), py::call_guard<py::gil_scoped_release>(),
           py::arg("library"), py::arg("process_set"), py::arg("family"))
      .def_property_readonly("is_due", py::cpp_function(&Draining::IsDue, py::call_guard<py::gil_scoped_release>()))
      .def("end", &Draining::End, py::call_guard<py::gil_scoped_release>());

  py::class_<Bringers::ForeignWait>(m, "ForeignWait")
      .def(py::init(&attach::BeginForeignWait), py::call_guard<py::gil_scoped_release>());
  m.def("polled", &attach::Polled, py::call_guard<py::gil_scoped_release>(), py::arg("over"));

  py::class_<Handle>(m, "Handle")
      .def("poll", &Handle::Poll)
      .def("wait", &Handle::Wait, py::arg("drainings"))
      .def("info", &Handle::Info);

  py::class_<Flush>(m, "Flush")
      .def(py::init(&Flush::Begin), py::call_guard<py::gil_scoped_release>(), py::arg("library"),
           py::arg("process_set"), py::arg("drained"), py::arg("ends"))
      .def("wait", &Flush::Wait, py::call_guard<py::gil_scoped_release>(), py::arg("drainings"))
      .def_property_readonly("was_needed", &Flush::WasNeeded)
      .def("end", &Flush::End, py::call_guard<py::gil_scoped_release>());

  py::module_::import("horovod_partial._core");  // it defines BucketSpec
  py::class_<BucketConfig>(m, "BucketConfig")
      .def(py::init([](const BucketSpec& spec, int type, std::vector<std::int64_t> shape, int device) {
             return BucketConfig{spec, &attach::MemoryOf(device), static_cast<DataType>(type), std::move(shape)};
           }),
           py::arg("spec"), py::kw_only(), py::arg("dtype"), py::arg("shape"), py::arg("device"));

  using heartbeat::Monitor;
  using Neighbours = std::map<Rank, pid_t>;
  py::class_<Monitor>(m, "Monitor")
      .def_static(
          "listen",
          [](int size, double abort, double stall, const Neighbours& neighbours) {
            const heartbeat::Limits limits{heartbeat::Seconds(abort), heartbeat::Seconds(stall)};
            return Monitor::Listen(size, limits, MonitorCalls(0, limits, neighbours));
          },
          py::call_guard<py::gil_scoped_release>(), py::arg("size"), py::kw_only(), py::arg("abort_seconds"),
          py::arg("stall_seconds"), py::arg("neighbours"))
      .def_static(
          "join",
          [](Rank rank, const std::string& endpoint, double abort, double stall, const Neighbours& neighbours) {
            const heartbeat::Limits limits{heartbeat::Seconds(abort), heartbeat::Seconds(stall)};
            return Monitor::Join(rank, limits, endpoint, MonitorCalls(rank, limits, neighbours));
          },
          py::call_guard<py::gil_scoped_release>(), py::arg("rank"), py::arg("endpoint"), py::kw_only(),
          py::arg("abort_seconds"), py::arg("stall_seconds"), py::arg("neighbours"))
      .def("rest", &Monitor::Rest)
      .def_property_readonly("endpoint", &Monitor::endpoint);

  using attach::SharedSteps;
  py::class_<SharedSteps, std::shared_ptr<SharedSteps>>(m, "SharedSteps")
      .def(py::init([](const std::string& name, const std::vector<std::int64_t>& elements,
                       const FusionSteps::Messages& messages, std::int64_t due,
                       std::size_t window) { return SharedSteps::Declare({name, elements, messages, due, window}); }),
           py::arg("name"), py::arg("elements"), py::arg("messages"), py::arg("due"), py::arg("window"))
      .def(
          "enter",
          [](SharedSteps& self, const std::string& library, std::int32_t process_set) {
            py::gil_scoped_release release;
            self.Enter(attach::SessionOf(library, process_set));
          },
          py::arg("library"), py::arg("process_set"))
      .def(
          "record_gradient",
          [](SharedSteps& self, int gradient, std::int64_t elements) {
            self.With([&](FusionSteps& steps) { steps.RecordGradient(gradient, elements, NowSeconds()); });
          },
          py::arg("gradient"), py::arg("elements"))
      .def("record_all_gradients",
           [](SharedSteps& self) { self.With([](FusionSteps& steps) { steps.RecordAllGradients(NowSeconds()); }); })
      .def(
          "step_ended",
          [](SharedSteps& self) { return self.With([](FusionSteps& steps) { return steps.StepEnded(NowSeconds()); }); })
      .def("measures", [](SharedSteps& self) { return self.With([](FusionSteps& steps) { return steps.Measures(); }); })
      .def_property_readonly(
          "plans", [](SharedSteps& self) { return self.With([](FusionSteps& steps) { return steps.plans(); }); })
      .def(
          "plan",
          [](SharedSteps& self, std::optional<FusionSteps::Messages> messages, std::optional<std::int64_t> due) {
            self.With([&](FusionSteps& steps) { steps.Plan(std::move(messages), due); });
          },
          py::arg("messages"), py::arg("due"))
      .def(
          "times",
          [](SharedSteps& self, bool first) {
            return self.With([&](FusionSteps& steps) { return first ? steps.first_rows() : steps.last_rows(); });
          },
          py::kw_only(), py::arg("first"));

  m.def("attach", &attach::Attach, py::call_guard<py::gil_scoped_release>(), py::arg("library"), py::kw_only(),
        py::arg("waits_are_told"));
  m.def(
      "require_process_set",
      [](const std::string& library, std::int32_t process_set) {
        py::gil_scoped_release release;
        attach::SessionOf(library, process_set);
      },
      py::arg("library"), py::arg("process_set"));
  m.def("gather", &attach::Gather, py::call_guard<py::gil_scoped_release>(), py::arg("library"), py::arg("text"));
  m.def("record", &attach::Record, py::call_guard<py::gil_scoped_release>(), py::arg("library"), py::arg("directory"),
        py::arg("most_bytes"));
  m.def(
      "record_wait",
      [](const std::string& library, std::int64_t begin, std::int64_t end) {
        attach::RecordWait(library, std::chrono::nanoseconds(begin), std::chrono::nanoseconds(end));
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("library"), py::arg("begin"), py::arg("end"));
  m.def("end_recording", &attach::EndRecording, py::call_guard<py::gil_scoped_release>(), py::arg("library"));
  m.def(
      "set_thresholds",
      [](double waiting_seconds, double parked_seconds) {
        attach::SetThresholds({Seconds(waiting_seconds), Seconds(parked_seconds)});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("waiting_seconds"), py::arg("parked_seconds"));
  // The log of the process is here, because the hooks write to it.
  m.def("set_log_level", [](int level) { SetLogLevel(static_cast<LogLevel>(level)); }, py::arg("level"));
  m.def(
      "log", [](int level, Rank rank, const std::string& text) { Log(static_cast<LogLevel>(level), rank, text); },
      py::arg("level"), py::arg("rank"), py::arg("text"));
  m.def("prepare_stacks", &PrepareStacks);
  m.def("take_stacks", &TakeStacks);
  m.def("submit", &Submit, py::arg("library"), py::arg("process_set"), py::arg("name"), py::arg("config"),
        py::arg("input"), py::arg("output"), py::arg("work"), py::arg("stream"));
  m.def("declare", &Declare, py::arg("library"), py::arg("process_set"), py::arg("name"), py::arg("config"));
  m.def("next_micro_batch", &NextMicroBatch, py::arg("library"), py::arg("process_set"), py::arg("names"),
        py::arg("begins"), py::arg("waits"), py::arg("drainings"));
  m.def("return_micro_batch", &ReturnMicroBatch, py::arg("library"), py::arg("process_set"), py::arg("name"));
  m.def("collect", &Collect, py::arg("library"), py::arg("process_set"), py::arg("name"), py::arg("pointer"),
        py::kw_only(), py::arg("to_host") = false);
  m.def(
      "needed_libraries", [](const std::string& library) { return attach::Library(library).Needed(); },
      py::arg("library"));
  m.def("generation", &attach::Generation, py::call_guard<py::gil_scoped_release>(), py::arg("library"));
  m.def("device_of_buckets", &attach::DeviceOfBuckets, py::call_guard<py::gil_scoped_release>(), py::arg("library"),
        py::arg("process_set"));
  m.def("taken", &attach::Taken, py::call_guard<py::gil_scoped_release>(), py::arg("library"), py::arg("process_set"),
        py::arg("name"));
  m.def("lost", &attach::Lost, py::call_guard<py::gil_scoped_release>(), py::arg("library"), py::arg("process_set"),
        py::arg("names"));
  m.def("catch_up", &attach::CatchUp, py::call_guard<py::gil_scoped_release>(), py::arg("library"),
        py::arg("process_set"), py::arg("name"), py::arg("iteration"));
  m.def("take_round", &TakeRound, py::arg("library"), py::arg("process_set"), py::arg("names"), py::arg("pointers"));
  m.def("has_round", &HasRound, py::arg("library"), py::arg("process_set"), py::arg("names"));
  m.def("deliver", &Deliver, py::arg("library"), py::arg("process_set"), py::arg("families"));
  m.def("say_farewell", &SayFarewell, py::arg("library"), py::arg("failure"));
  m.def("claim", &Claim, py::arg("library"), py::arg("process_set"), py::arg("names"));
  m.def("clear", &Clear, py::arg("library"), py::arg("process_set"), py::arg("names"));
  m.def("statistics", &Statistics, py::arg("library"), py::arg("process_set"));
}
