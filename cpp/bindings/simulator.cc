#include "bindings/simulator.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bindings/conversions.h"
#include "core/quorum/policy.h"
#include "core/values/fields.h"
#include "simulator/job.h"
#include "simulator/shared_job.h"

namespace py = pybind11;

namespace horovod_partial {
namespace {

using Matrix = py::array_t<double, py::array::c_style | py::array::forcecast>;

std::vector<double> Numbers(const Matrix& matrix) { return {matrix.data(), matrix.data() + matrix.size()}; }

py::dict RunJob(const Matrix& delays, const std::vector<double>& ready, const std::vector<double>& bytes,
                double compute, const std::vector<std::pair<double, double>>& costs, double cycle, int average_period,
                bool overlap, const std::string& late, const Policy& policy) {
  JobConfig config;
  config.iterations = static_cast<int>(delays.shape(0));
  config.ranks = static_cast<int>(delays.shape(1));
  config.policy = policy;
  config.messages = Gradients(ready, bytes);
  config.late = FromName<Late>("late", late);
  config.compute = compute;
  config.delays = Numbers(delays);
  for (const auto& [latency, seconds_per_byte] : costs) config.costs.push_back({latency, seconds_per_byte});
  config.cycle = cycle;
  config.period = average_period;
  config.overlap = overlap;
  JobResult result;
  {
    py::gil_scoped_release release;
    result = Job(std::move(config)).Run();
  }
  Matrix ends({delays.shape(0), delays.shape(1)});
  std::copy(result.ends.begin(), result.ends.end(), ends.mutable_data());
  py::list messages;
  for (const BucketStatistics& statistics : result.messages) messages.append(Describe(statistics));
  py::dict figures;
  figures["ends"] = std::move(ends);
  figures["arrivals"] = result.arrivals;
  figures["late"] = result.late;
  figures["messages"] = std::move(messages);
  return figures;
}

py::tuple RunSharedJob(const Matrix& in_first, const Matrix& in_each, const Matrix& in_own,
                       const std::vector<double>& ready, const std::vector<double>& bytes, double compute,
                       const std::pair<double, double>& cost, double cycle) {
  const py::ssize_t updates = in_own.shape(0);
  const py::ssize_t ranks = in_first.shape(1);
  SharedJobConfig config;
  config.ranks = static_cast<int>(ranks);
  config.passes = static_cast<int>(in_own.shape(1) / ranks);
  config.updates = static_cast<int>(updates);
  config.compute = compute;
  config.in_first = Numbers(in_first);
  config.in_each = Numbers(in_each);
  config.in_own = Numbers(in_own);
  config.messages = Gradients(ready, bytes);
  config.cost = {cost.first, cost.second};
  config.cycle = cycle;
  SharedJobResult result;
  {
    py::gil_scoped_release release;
    result = SharedJob(std::move(config)).Run();
  }
  py::array_t<int> made({updates, ranks});
  std::copy(result.made.begin(), result.made.end(), made.mutable_data());
  return py::make_tuple(result.ends, std::move(made), result.bounds);
}

}  // namespace

void BindSimulator(py::module_& m) {
  m.def("run_job", &RunJob, py::kw_only(), py::arg("delays"), py::arg("ready"), py::arg("bytes"), py::arg("compute"),
        py::arg("costs"), py::arg("cycle"), py::arg("average_period"), py::arg("overlap"), py::arg("late"),
        py::arg("policy"));
  m.def("run_shared_job", &RunSharedJob, py::kw_only(), py::arg("in_first"), py::arg("in_each"), py::arg("in_own"),
        py::arg("ready"), py::arg("bytes"), py::arg("compute"), py::arg("cost"), py::arg("cycle"));
}

}  // namespace horovod_partial
