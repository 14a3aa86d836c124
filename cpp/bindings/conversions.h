// Between Python and the core, for both extensions.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/bucket.h"
#include "core/policy.h"
#include "core/statistics.h"

namespace horovod_partial {

inline Time Seconds(double seconds) { return std::chrono::duration_cast<Time>(std::chrono::duration<double>(seconds)); }

// A value of an enumeration by its name.
template <class Value>
Value ByName(const char* what, const std::string& name, const std::map<std::string, Value>& values) {
  const auto it = values.find(name);
  if (it == values.end()) throw pybind11::value_error(std::string("unknown ") + what + " '" + name + "'");
  return it->second;
}

inline Policy MakePolicy(const std::string& rule, int quorum, std::uint64_t seed, Round max_staleness,
                         double grace_seconds, const std::string& schedule, int group_size,
                         const std::vector<Partition>& table, Round period, int window,
                         const std::string& description) {
  Policy policy;
  policy.rule = ByName<Policy::Rule>(
      "rule", rule,
      {{"quorum", Policy::Rule::kQuorum}, {"initiator", Policy::Rule::kInitiator}, {"ready", Policy::Rule::kReady}});
  policy.quorum = quorum;
  policy.seed = seed;
  policy.max_staleness = max_staleness;
  policy.grace = grace_seconds < 0 ? Policy::kAutomaticGrace : Seconds(grace_seconds);
  policy.schedule.kind = ScheduleKindFromName(schedule);
  policy.schedule.table = table;
  (policy.rule == Policy::Rule::kReady ? policy.group_size : policy.schedule.group_size) = group_size;
  policy.period = period;
  policy.window = window;
  policy.description = description;
  return policy;
}

inline Late LateFromName(const std::string& name) {
  return ByName<Late>("late", name,
                      {{"accumulate", Late::kAccumulate}, {"keep", Late::kKeep}, {"discard", Late::kDiscard}});
}

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
  result["fresh"] = statistics.fresh;
  result["staleness"] = staleness;
  return result;
}

}  // namespace horovod_partial
