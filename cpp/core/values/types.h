// Types that every part of cpp/core uses.
#pragma once

#include <chrono>
#include <cstdint>

namespace horovod_partial {

using Rank = int;
using Round = std::int64_t;

// A time or a duration. Code in cpp/core never reads a clock. It gets the time as an argument, because tests and the
// simulator have clocks of their own.
using Time = std::chrono::nanoseconds;
constexpr Time kNever = Time::max();
// One year. A longer time in a setting or in a message is an error.
constexpr Time kLongest = std::chrono::hours(24 * 365);

}  // namespace horovod_partial
