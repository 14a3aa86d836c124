// Conversions between Python and C++, for both extension modules.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <vector>

#include "core/merging/merging_plan.h"
#include "core/rounds/statistics.h"

namespace horovod_partial {

inline pybind11::dict Describe(const BucketStatistics& statistics) {
  pybind11::dict reasons;
  for (std::size_t i = 0; i < statistics.by_reason.size(); ++i)
    reasons[NameOf(static_cast<Closing::Reason>(i))] = statistics.by_reason[i];
  pybind11::dict staleness;
  for (const auto& [rounds, count] : statistics.staleness) staleness[pybind11::int_(rounds)] = count;
  pybind11::dict result;
  result["rounds"] = statistics.rounds;
  result["closed_by"] = reasons;
  result["on_time"] = statistics.on_time;
  result["late"] = statistics.late;
  result["gradients"] = statistics.gradients;
  result["fresh"] = statistics.fresh;
  result["staleness"] = staleness;
  return result;
}

inline std::vector<Gradient> Gradients(const std::vector<double>& ready, const std::vector<double>& bytes) {
  if (ready.size() != bytes.size())
    throw pybind11::value_error("ready and bytes must have one number for each gradient");
  std::vector<Gradient> gradients;
  for (std::size_t i = 0; i < ready.size(); ++i) gradients.push_back({ready[i], bytes[i]});
  return gradients;
}

}  // namespace horovod_partial
