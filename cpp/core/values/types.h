// Types that every part of cpp/core uses.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace horovod_partial {

using Rank = int;
using Round = std::int64_t;

// Returns a rank as an index into a container with an item for each rank.
inline std::size_t Index(Rank rank) { return static_cast<std::size_t>(rank); }

// A time or a duration. Code in cpp/core never reads a clock. It gets the time as an argument, because tests and the
// simulator have clocks of their own.
using Time = std::chrono::nanoseconds;
constexpr Time kNever = Time::max();
inline double ToSeconds(Time time) { return std::chrono::duration<double>(time).count(); }
// Rounds to the nearest nanosecond.
inline Time FromSeconds(double seconds) {
  return std::chrono::floor<Time>(std::chrono::duration<double>(seconds + 5e-10));
}
// One year. A longer time in a setting or in a message is an error.
constexpr Time kLongest = std::chrono::hours(24 * 365);

// The base of classes whose objects cannot be copied.
struct NonCopyable {
  NonCopyable() = default;
  NonCopyable(const NonCopyable&) = delete;
  NonCopyable& operator=(const NonCopyable&) = delete;
};

}  // namespace horovod_partial
