// Makes the simulator available to Python.
#pragma once

#include <pybind11/pybind11.h>

namespace horovod_partial {

void BindSimulator(pybind11::module_& m);

}  // namespace horovod_partial
