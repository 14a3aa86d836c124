// Types that every part of the core uses.
#pragma once

#include <chrono>
#include <cstdint>

namespace horovod_partial {

using Rank = int;
using Round = std::int64_t;

// A time or a duration. The core never reads a clock: it gets the time as an argument, because tests and the simulator
// have clocks of their own.
using Time = std::chrono::nanoseconds;
constexpr Time kNever = Time::max();
// A year. A longer time in a setting or in a message is an error.
constexpr Time kLongest = std::chrono::hours(24 * 365);

}  // namespace horovod_partial
