// The core's values by the names that Python knows them by.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/bucket.h"
#include "core/policy.h"

namespace horovod_partial {

inline Time Seconds(double seconds) { return std::chrono::duration_cast<Time>(std::chrono::duration<double>(seconds)); }

// A value of an enumeration by its name.
template <class Value>
Value ByName(const char* what, const std::string& name, const std::map<std::string, Value>& values) {
  const auto it = values.find(name);
  if (it == values.end()) throw std::invalid_argument(std::string("unknown ") + what + " '" + name + "'");
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

}  // namespace horovod_partial
