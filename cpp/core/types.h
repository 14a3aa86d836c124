// Vocabulary that every part of the core shares.
#pragma once

#include <chrono>
#include <cstdint>

namespace horovod_partial {

using Rank = int;
using Round = std::int64_t;

// Time comes into the core as an argument: tests and the simulator bring clocks of their own.
using Time = std::chrono::nanoseconds;
constexpr Time kNever = Time::max();
// A year: what lasts longer, as a setting or as another rank has it, is an error.
constexpr Time kLongest = std::chrono::hours(24 * 365);

}  // namespace horovod_partial
