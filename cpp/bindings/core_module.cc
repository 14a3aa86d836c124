// horovod_partial._core: what needs no Horovod. The log, and the wire sizes that tests check.
#include <pybind11/pybind11.h>

#include "engine/log.h"

namespace py = pybind11;
using namespace horovod_partial;

PYBIND11_MODULE(_core, m) {
  m.doc() = "The part of horovod_partial that needs no Horovod.";
  m.def("set_log_level", [](int level) { SetLogLevel(static_cast<LogLevel>(level)); }, py::arg("level"));
  m.def("log", [](int level, Rank rank, const std::string& text) { Log(static_cast<LogLevel>(level), rank, text); },
        py::arg("level"), py::arg("rank"), py::arg("text"));
}
