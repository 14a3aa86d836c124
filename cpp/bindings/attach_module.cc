// horovod_partial._attach: partial collectives on an installed Horovod. It knows no framework: tensors are addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "attach/attachment.h"
#include "attach/device.h"
#include "attach/library.h"
#include "attach/sessions.h"
#include "bindings/conversions.h"
#include "bindings/monitor_calls.h"
#include "bindings/stacks.h"
#include "engine/engine.h"
#include "engine/log.h"
#include "engine/surroundings.h"
#include "heartbeat/monitor.h"

namespace py = pybind11;
using namespace horovod_partial;
using attach::Attached;
using attach::Session;

namespace {

// The buckets of an optimizer. Each call looks up the present session (this rank's state for a process set), because
// Horovod may have been shut down and initialised again. Python's interpreter lock guards the counts.
struct FamilyHandle {
  Attached& library;
  py::object process_set;  // Horovod's ProcessSet. A restart changes its number, and a removal sets it to None
  Family names;
  Round disturbed = 0;    // rounds applied to a copy of the model in vain, because the program changed the model
  Round lost_before = 0;  // the number of lost rounds when count_anew was last called
  int generation = 0;     // the value of attach::Generation when the two counts began

  std::int32_t number() const {
    constexpr std::int32_t kRemoved = -1;
    const py::object id = process_set.attr("process_set_id");
    return id.is_none() ? kRemoved : id.cast<std::int32_t>();
  }
  // Must be called before the counts are used. Sets them to 0 if hvd.init() has run since they began.
  void EnterGeneration() {
    const int now = attach::Generation(library);
    if (now != generation) disturbed = lost_before = 0;
    generation = now;
  }
};

// Makes a method of FamilyHandle that calls `ask` with this rank's engine, without the interpreter's lock. If this rank
// has no session, the method returns the default value of its result type.
template <class Result, class... Arguments>
auto IfThere(Result (*ask)(Engine&, const Family&, Arguments...)) {
  return [ask](const FamilyHandle& family, Arguments... arguments) {
    const std::int32_t number = family.number();
    py::gil_scoped_release release;
    const auto session = attach::FindSession(family.library, number);
    return session == nullptr ? Result() : ask(session->engine(), family.names, arguments...);
  };
}

Round LostInAll(FamilyHandle& family) {
  family.EnterGeneration();
  const auto lost = IfThere(+[](Engine& engine, const Family& names) { return engine.families().Lost(names); });
  return family.disturbed + lost(family);
}

// After this time, a thread that waits takes any round of an optimizer whose round hooks may wait. The wait may depend
// on the round: other ranks may wait for this rank in a collective of such a hook.
constexpr std::chrono::seconds kLongWait(1);

// While an object of this class lives, the thread that steps an optimizer waits for something else, and takes results
// of the optimizer's buckets meanwhile. The thread has waited since `since`.
class DrainedFamily {
 public:
  DrainedFamily(std::shared_ptr<Session> session, Family family, Time since, bool hooks_wait)
      : session_(std::move(session)), family_(std::move(family)), since_(since), hooks_wait_(hooks_wait) {
    if (session_ != nullptr) draining_.emplace(session_->engine().buckets().FindAll(family_));
  }
  bool IsDue() const {
    if (session_ == nullptr) return false;
    const Families& families = session_->engine().families();
    const bool takes_any = hooks_wait_ && Now() - since_ >= kLongWait;
    return takes_any ? families.HasRound(family_) : families.IsNearlyFull(family_);
  }
  void End() { draining_.reset(); }

 private:
  const std::shared_ptr<Session> session_;
  const Family family_;
  const Time since_;
  const bool hooks_wait_;
  std::optional<Draining> draining_;
};

std::unique_ptr<DrainedFamily> Drain(const FamilyHandle& family, double waited, bool hooks_wait) {
  const std::int32_t number = family.number();
  py::gil_scoped_release release;
  const Time since = Now() - FromSeconds(waited);
  return std::make_unique<DrainedFamily>(attach::FindSession(family.library, number), family.names, since, hooks_wait);
}

using Drainings = std::vector<const DrainedFamily*>;

// Returns a function that tells whether an optimizer in `drainings` must take results soon, or null without any.
IsDue AnyOf(const Drainings& drainings) {
  if (drainings.empty()) return nullptr;
  return [drainings] {
    return std::any_of(drainings.begin(), drainings.end(), [](const auto* each) { return each->IsDue(); });
  };
}

// Python's reference to an owner of buckets, for example an optimizer. When Python destroys the reference, this rank
// gives up the buckets. A garbage collector may do this in any thread, and while the thread holds any lock.
struct OwnerReference : private NonCopyable {
  ~OwnerReference() { owner->Leave(); }

  const std::shared_ptr<Owner> owner = std::make_shared<Owner>();
};

// Lets buckets live as long as an owner. When the owners on all ranks are destroyed, all ranks forget the buckets.
void Own(const FamilyHandle& family, const OwnerReference& owner) {
  const std::int32_t number = family.number();
  py::gil_scoped_release release;
  for (const auto& name : family.names)
    attach::SessionOf(family.library, number)->engine().buckets().Own(name, owner.owner);
}

// Returns the micro-batch that this rank may begin next, or nothing. Waits for a micro-batch only if `waits` is set.
std::optional<std::pair<int, int>> NextMicroBatch(const FamilyHandle& family, bool begins, bool waits,
                                                  const Drainings& drainings) {
  const std::int32_t number = family.number();
  py::gil_scoped_release release;
  const auto is_due = waits ? AnyOf(drainings) : [] { return true; };
  return attach::SessionOf(family.library, number)->engine().sharing().Next(family.names, begins, is_due);
}

using StreamHandle = std::pair<int, std::uintptr_t>;  // the number of a device, and its handle of a stream

// Takes the oldest untaken round of an optimizer's buckets. `pointers` has memory for the result of each bucket. What
// is queued on `streams` may still use this memory. Returns the number of gradients in the round, or nothing if this
// rank can take no round.
std::optional<int> TakeRound(Engine& engine, const Family& names, const std::vector<std::uintptr_t>& pointers,
                             const std::vector<StreamHandle>& streams) {
  std::vector<void*> outputs;
  for (const std::uintptr_t pointer : pointers) outputs.push_back(reinterpret_cast<void*>(pointer));
  return engine.families().TakeRound(names, outputs, [&streams] {
    for (const auto& [device, handle] : streams) attach::StreamOf(device, handle)->Synchronize();
  });
}

// An arrival whose result the application has not fetched yet. A handle keeps the session alive, but not the tensors:
// the framework must keep the tensors until `wait` has returned.
class Handle {
 public:
  Handle(std::shared_ptr<Session> session, std::shared_ptr<SharedBucket> bucket, std::shared_ptr<Operation> operation)
      : session_(std::move(session)), bucket_(std::move(bucket)), operation_(std::move(operation)) {}

  bool Poll() const { return session_->engine().Poll(*bucket_, *operation_); }
  bool Wait(const Drainings& drainings) const {
    return session_->engine().Wait(*bucket_, *operation_, AnyOf(drainings));
  }
  RoundInfo Info() const {
    if (!Poll()) throw py::value_error("the operation has not finished; synchronize it first");
    return operation_->info;
  }

 private:
  std::shared_ptr<Session> session_;
  std::shared_ptr<SharedBucket> bucket_;
  std::shared_ptr<Operation> operation_;
};

// Hands a contribution to a bucket. `stream`: the stream on which a device computes the contribution; 0 on the host.
Handle Submit(Attached& library, std::int32_t process_set, const std::string& name, const BucketConfig& config,
              std::uintptr_t input, std::uintptr_t output, int work, std::uintptr_t stream) {
  static char nothing;  // replaces the null address of a tensor without elements; null would mean no tensor
  const auto address = [](std::uintptr_t pointer) {
    return pointer == 0 ? &nothing : reinterpret_cast<void*>(pointer);
  };
  auto session = attach::SessionOf(library, process_set);
  auto bucket = session->engine().buckets().Declare(name, config);
  auto ready = attach::StreamOf(config.memory->device(), stream)->Record();
  auto arrived = session->engine().Arrive(bucket, {address(input), address(output), 1, work}, std::move(ready));
  return {std::move(session), std::move(bucket), std::move(arrived)};
}

// Takes the results that this rank has missed, and returns nothing if it has missed none. `pointer` has room for the
// whole bucket, on the bucket's device.
std::optional<Handle> Collect(Attached& library, std::int32_t process_set, const std::string& name,
                              std::uintptr_t pointer) {
  auto session = attach::FindSession(library, process_set);
  auto bucket = session == nullptr ? nullptr : session->engine().buckets().Find(name);
  if (bucket == nullptr) return std::nullopt;
  auto operation = session->engine().Collect(bucket, reinterpret_cast<void*>(pointer));
  if (operation == nullptr) return std::nullopt;
  return Handle(std::move(session), std::move(bucket), std::move(operation));
}

// A flush of a process set. Without a session there is nothing to flush, so the flush is over at once.
class FlushOfSet {
 public:
  FlushOfSet(Attached& library, std::int32_t process_set, std::vector<Family> drained, bool ends)
      : session_(attach::FindSession(library, process_set)) {
    const auto kind = ends ? Flush::Kind::kEnding : Flush::Kind::kFlushing;
    if (session_ != nullptr) flushing_.emplace(session_->engine(), kind, std::move(drained));
  }
  bool Wait(const Drainings& drainings) { return flushing_ && flushing_->Wait(AnyOf(drainings)); }
  bool WasNeeded() const { return flushing_ && flushing_->was_needed(); }
  void End() { flushing_.reset(); }

 private:
  const std::shared_ptr<Session> session_;
  std::optional<Engine::Flushing> flushing_;
};

py::list RanksOf(const heartbeat::Monitor& monitor) {
  std::vector<WatchedRank> ranks;
  {
    py::gil_scoped_release release;
    ranks = monitor.Ranks();
  }
  py::list result;
  for (const WatchedRank& rank : ranks) {
    py::dict of;
    of["steps"] = rank.steps;
    of["compute_seconds"] = rank.compute_seconds;
    of["step_seconds"] = rank.step_seconds;
    of["bytes"] = rank.bytes;
    of["slowness"] = rank.slowness ? rank.slowness->factor : 1.0;
    of["kind"] = rank.slowness ? NameOf(rank.slowness->kind) : "none";
    of["part"] = rank.part;
    const auto tell = [&](const auto& sign) {
      if (sign.value >= 0) of[sign.name] = sign.value;
    };
    std::apply([&](const auto&... sign) { (tell(sign), ...); }, MachineSigns::Fields(rank.signs));
    std::apply([&](const auto&... part) { (tell(part), ...); }, Parts::Fields(rank.parts));
    result.append(of);
  }
  return result;
}

py::dict Statistics(Attached& library, std::int32_t process_set) {
  std::vector<BucketSnapshot> buckets;
  attach::Coordination::Statistics of_coordinator;
  {
    // While locks are held, no Python object is made. To make one may start Python's garbage collection, which may run
    // any code of the application, and this code may need one of the locks.
    py::gil_scoped_release release;
    if (const auto session = attach::ReadySession(library, process_set)) {
      buckets = session->engine().Snapshot();
      of_coordinator = session->StatisticsOfCoordinator();
    }
  }
  py::dict result;
  for (const auto& [name, statistics, bytes_held, pending, missed_rounds, completed, unsettled] : buckets) {
    py::dict description = Describe(statistics);
    description["waited_seconds"] = statistics.waited_seconds;
    description["groups_made"] = statistics.groups_made;
    description["setup_seconds"] = statistics.setup_seconds;
    description["dropped"] = statistics.dropped;
    description["healed"] = statistics.healed;
    description["summed"] = statistics.summed;
    description["bytes_held"] = bytes_held;
    description["pending"] = pending;
    description["missed_rounds"] = missed_rounds;
    description["completed"] = completed;
    description["unsettled"] = unsettled;
    if (const auto found = of_coordinator.find(name); found != of_coordinator.end()) {
      description["arrival_offset_seconds"] = found->second.offsets;
      if (found->second.unconnected) description["unconnected_windows"] = *found->second.unconnected;
    }
    result[py::str(name)] = description;
  }
  return result;
}

}  // namespace

PYBIND11_MODULE(_attach, m) {
  m.doc() = "Partial collectives inside the coordination cycle of an installed Horovod.";
  py::register_exception<attach::AttachError>(m, "AttachError", PyExc_ImportError);
  py::register_local_exception_translator([](std::exception_ptr exception) {
    try {
      std::rethrow_exception(std::move(exception));
    } catch (const EngineError& error) {
      const auto errors = py::module_::import("horovod.common.exceptions");
      PyErr_SetString(errors.attr("HorovodInternalError").ptr(), error.what());
    }
  });

  // Runs Python's signal handlers during a wait, so that Ctrl-C ends the wait.
  Session::SetInterrupt([] {
    py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });

  const py::call_guard<py::gil_scoped_release> released;
  const py::arg library("library");
  py::class_<Attached, std::unique_ptr<Attached, py::nodelete>> horovod(m, "Library");
  const py::arg process_set("process_set");
  const py::arg name("name");

  py::class_<RoundInfo>(m, "RoundInfo")
      .def_readonly("round", &RoundInfo::round)
      .def_readonly("late", &RoundInfo::late)
      .def_readonly("fresh", &RoundInfo::fresh)
      .def_readonly("gradients", &RoundInfo::gradients)
      .def_readonly("staleness", &RoundInfo::staleness)
      .def_readonly("empty", &RoundInfo::empty)
      .def_readonly("members", &RoundInfo::members)
      .def_readonly("work", &RoundInfo::work);

  py::class_<OwnerReference>(m, "Owner").def(py::init<>());

  py::class_<DrainedFamily>(m, "Draining")
      .def_property_readonly("is_due", py::cpp_function(&DrainedFamily::IsDue, released))
      .def("end", &DrainedFamily::End, released);

  using Names = const Family&;
  py::class_<FamilyHandle>(m, "Family")
      .def(py::init<Attached&, py::object, Family>(), library, process_set, py::arg("names"))
      .def_readonly("names", &FamilyHandle::names)
      .def_readonly("process_set", &FamilyHandle::process_set)
      .def_property_readonly("taken",
                             IfThere(+[](Engine& engine, Names names) { return engine.families().Taken(names); }))
      .def_property_readonly("lost",
                             [](FamilyHandle& family) {
                               const Round lost = LostInAll(family);
                               return lost - family.lost_before;
                             })
      .def_property_readonly("has_round",
                             IfThere(+[](Engine& engine, Names names) { return engine.families().HasRound(names); }))
      .def(
          "disturb",
          [](FamilyHandle& family, int rounds) {
            family.EnterGeneration();
            family.disturbed += rounds;
          },
          py::arg("rounds"))
      .def("count_anew", [](FamilyHandle& family) { family.lost_before = LostInAll(family); })
      .def("count_healed", IfThere(+[](Engine& engine, Names names) { engine.families().CountHealed(names); }))
      .def("own", &Own, py::arg("owner"))
      .def("take_round", IfThere(&TakeRound), py::arg("pointers"), py::arg("streams"))
      .def("claim", IfThere(+[](Engine& engine, Names names) { engine.families().Claim(names); }))
      .def("clear", IfThere(+[](Engine& engine, Names names) { engine.families().Clear(names); }))
      .def("catch_up", IfThere(+[](Engine& engine, Names names, int to) { return engine.CatchUp(names.at(0), to); }),
           py::arg("iteration"))
      .def("drain", &Drain, py::arg("waited"), py::arg("hooks_wait"))
      .def("next_micro_batch", &NextMicroBatch, py::arg("begins"), py::arg("waits"), py::arg("drainings"))
      .def("return_micro_batch", IfThere(+[](Engine& engine, Names names) { engine.sharing().Return(names.at(0)); }));

  py::class_<PossibleArrivals::ForeignWait>(m, "ForeignWait")
      .def(py::init([] {
             return std::make_unique<PossibleArrivals::ForeignWait>(attach::PossibleArrivalsOfProcess(), Now());
           }),
           released);
  m.def(
      "polled", [](bool over) { return ToSeconds(attach::PossibleArrivalsOfProcess()->Polled(over, Now())); }, released,
      py::arg("over"));

  py::class_<Handle>(m, "Handle")
      .def("poll", &Handle::Poll)
      .def("wait", &Handle::Wait, released, py::arg("drainings"))
      .def("info", &Handle::Info);

  py::class_<FlushOfSet>(m, "Flush")
      .def(py::init<Attached&, std::int32_t, std::vector<Family>, bool>(), released, library, process_set,
           py::arg("drained"), py::arg("ends"))
      .def("wait", &FlushOfSet::Wait, released, py::arg("drainings"))
      .def_property_readonly("was_needed", &FlushOfSet::WasNeeded)
      .def("end", &FlushOfSet::End, released);

  py::module_::import("horovod_partial._core");  // BucketConfig needs the class BucketSpec, which _core defines
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
          released, py::arg("size"), py::kw_only(), py::arg("abort_seconds"), py::arg("stall_seconds"),
          py::arg("neighbours"))
      .def_static(
          "join",
          [](Rank rank, const std::string& endpoint, double abort, double stall, const Neighbours& neighbours) {
            const heartbeat::Limits limits{heartbeat::Seconds(abort), heartbeat::Seconds(stall)};
            return Monitor::Join(rank, limits, endpoint, MonitorCalls(rank, limits, neighbours));
          },
          released, py::arg("rank"), py::arg("endpoint"), py::kw_only(), py::arg("abort_seconds"),
          py::arg("stall_seconds"), py::arg("neighbours"))
      .def("rest", &Monitor::Rest)
      .def("ranks", &RanksOf)
      .def_property_readonly("endpoint", &Monitor::endpoint);

  m.def("attach", &attach::Attach, released, py::return_value_policy::reference, library, py::kw_only(),
        py::arg("waits_are_told"));
  m.def("needed_libraries", [](const std::string& path) { return attach::Library(path).Needed(); }, library);
  m.def(
      "set_thresholds",
      [](double waiting_seconds, double parked_seconds) {
        attach::SessionsOfProcess().SetThresholds({FromSeconds(waiting_seconds), FromSeconds(parked_seconds)});
      },
      released, py::arg("waiting_seconds"), py::arg("parked_seconds"));
  // The one log of this process is in _attach, because our code in Horovod's background thread writes to it, too.
  m.def("set_log_level", [](int level) { SetLogLevel(static_cast<LogLevel>(level)); }, py::arg("level"));
  m.def(
      "log", [](int level, Rank rank, const std::string& text) { Log(static_cast<LogLevel>(level), rank, text); },
      py::arg("level"), py::arg("rank"), py::arg("text"));
  m.def("prepare_stacks", &PrepareStacks);
  m.def("take_stacks", &TakeStacks);

  horovod
      .def(
          "require_process_set",
          [](Attached& library, std::int32_t process_set) { attach::SessionOf(library, process_set); }, released,
          process_set)
      .def("gather", &attach::Gather, released, py::arg("text"))
      .def_property_readonly("generation", py::cpp_function(&attach::Generation, released))
      .def(
          "device_of_buckets",
          [](Attached& library, std::int32_t process_set) {
            const auto session = attach::FindSession(library, process_set);
            return session == nullptr ? Memory::kHost : session->engine().device();
          },
          released, process_set)
      .def(
          "record",
          [](Attached& library, const std::string& directory, std::size_t most_bytes) {
            attach::SessionOf(library, 0)->recorder()->Begin(directory, most_bytes);
          },
          released, py::arg("directory"), py::arg("most_bytes"))
      .def(
          "watch", [](Attached& library, bool on) { attach::SessionOf(library, 0)->recorder()->Watch(on); }, released,
          py::arg("on"))
      .def(
          "record_wait",
          [](Attached& library, std::int64_t begin, std::int64_t end) {
            if (const auto recorder = library.LastRecorder())
              recorder->Waited(std::chrono::nanoseconds(begin), std::chrono::nanoseconds(end), false);
          },
          released, py::arg("begin"), py::arg("end"))
      // Keeps the interpreter's lock: it waits for nobody for long, and another thread would take that lock for longer.
      .def(
          "mark",
          [](Attached& library, std::int64_t iterator, std::int64_t begin, std::int64_t end, bool gives) {
            if (const auto recorder = library.LastRecorder())
              recorder->Marked({iterator, std::chrono::nanoseconds(begin), std::chrono::nanoseconds(end), gives});
          },
          py::arg("iterator"), py::arg("begin"), py::arg("end"), py::arg("gives"))
      .def(
          "end_recording",
          [](Attached& library) {
            if (const auto recorder = library.LastRecorder()) recorder->End();
          },
          released)
      // Tells the other ranks why this rank fails. Does nothing if Horovod is down, because then nothing can be sent.
      .def(
          "say_farewell",
          [](Attached& library, const std::string& failure) {
            if (const auto session = attach::FindSession(library, 0)) session->engine().SayFarewell(failure);
          },
          released, py::arg("failure"))
      .def("statistics", &Statistics, process_set)
      .def(
          "unsettled_without_owner",
          [](Attached& library, std::int32_t process_set) {
            const auto session = attach::ReadySession(library, process_set);
            return session == nullptr ? std::set<std::string>() : session->engine().buckets().unsettled();
          },
          released, process_set)
      .def("submit", &Submit, released, process_set, name, py::arg("config"), py::arg("input"), py::arg("output"),
           py::arg("work"), py::arg("stream"))
      .def(
          "declare",
          [](Attached& library, std::int32_t process_set, const std::string& name, const BucketConfig& config) {
            attach::SessionOf(library, process_set)->engine().buckets().Declare(name, config);
          },
          released, process_set, name, py::arg("config"))
      .def("collect", &Collect, released, process_set, name, py::arg("pointer"))
      .def(
          "deliver",
          [](Attached& library, std::int32_t process_set, const std::vector<Family>& families) {
            if (const auto session = attach::FindSession(library, process_set)) session->engine().Deliver(families);
          },
          released, process_set, py::arg("families"));
}
