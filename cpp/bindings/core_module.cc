// horovod_partial._core: the part that needs no Horovod.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/conversions.h"
#include "bindings/fields.h"
#include "bindings/simulator.h"
#include "core/groups/schedule.h"
#include "core/groups/weights.h"
#include "core/merging/merging_plan.h"
#include "core/quorum/policy.h"
#include "core/rounds/bucket_spec.h"
#include "core/slowness/slow_parts.h"
#include "core/slowness/slow_ranks.h"
#include "core/values/fields.h"

namespace py = pybind11;
using namespace horovod_partial;

PYBIND11_MODULE(_core, m) {
  m.doc() = "The part of horovod_partial that needs no Horovod.";

  BindFields<Schedule>(m, "Schedule")
      .def(
          "groups", [](const Schedule& self, Round round, int size) { return GroupsOf(GroupsOf(self, round, size)); },
          py::arg("round"), py::arg("size"));
  BindFields<Policy>(m, "Policy");
  BindFields<BucketSpec>(m, "BucketSpec").def("encode", [](const BucketSpec& self) { return py::bytes(Encode(self)); });
  m.def("contraction_weights", &ContractionWeights, py::arg("steps"), py::arg("contraction"));
  m.def("staleness_weights", &StalenessWeights, py::arg("iterations"), py::arg("alpha"));
  py::class_<Periods>(m, "Periods")
      .def(py::init<int>(), py::arg("length"))
      .def("take_step", &Periods::TakeStep)
      .def("must_signal", &Periods::MustSignal, py::arg("ended"))
      .def("is_over", &Periods::IsOver, py::arg("ended"))
      .def("begin_next", &Periods::BeginNext)
      .def("begin_anew", &Periods::BeginAnew, py::arg("ended"))
      .def("work", &Periods::Work);

  m.def(
      "plan_merging",
      [](const std::string& rule, const std::vector<double>& ready, const std::vector<double>& bytes, double latency,
         double seconds_per_byte, double threshold_bytes) {
        return PlanMerging(FromName<MergingRule>("rule", rule), Gradients(ready, bytes), {latency, seconds_per_byte},
                           threshold_bytes);
      },
      py::arg("rule"), py::arg("ready"), py::arg("bytes"), py::arg("latency"), py::arg("seconds_per_byte"),
      py::arg("threshold_bytes"));
  m.def(
      "merging_messages",
      [](const MergingPlan& plan, const std::vector<double>& ready, const std::vector<double>& bytes, double latency,
         double seconds_per_byte) {
        py::list messages;
        for (const Message& message : Messages(plan, Gradients(ready, bytes), {latency, seconds_per_byte}))
          messages.append(py::make_tuple(message.start, message.end, message.bytes));
        return messages;
      },
      py::arg("plan"), py::arg("ready"), py::arg("bytes"), py::arg("latency"), py::arg("seconds_per_byte"));

  BindSimulator(m);

  BindFields<Slowness>(m, "Slowness").def("describe", &Slowness::Describe);
  py::class_<SlowRanks>(m, "SlowRanks")
      .def(py::init<int>(), py::arg("size"))
      .def(
          "step",
          [](SlowRanks& self, const std::vector<double>& seconds) {
            py::list news;
            for (const SlowRanks::News& one : self.Step(seconds))
              news.append(py::make_tuple(NameOf(one.change), one.slowness));
            return news;
          },
          py::arg("seconds"))
      .def("found", &SlowRanks::found, py::arg("rank"));
  const Parts none;
  m.attr("PARTS") = std::apply([](const auto&... part) { return py::make_tuple(part.name...); }, Parts::Fields(none));
  py::class_<SlowParts>(m, "SlowParts")
      .def(py::init<int>(), py::arg("size"))
      .def(
          "step",
          [](SlowParts& self, const std::vector<decltype(Parts::seconds)>& parts) {
            std::vector<Parts> of_ranks;
            for (const auto& seconds : parts) of_ranks.push_back({seconds});
            self.Step(of_ranks);
          },
          py::arg("parts"))
      .def(
          "cause",
          [](const SlowParts& self, Rank rank) {
            const auto [part, text] = self.CauseOf(rank);
            return py::make_tuple(part, text);
          },
          py::arg("rank"));
}
