// The median of values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace horovod_partial {

// Returns the median of one value or more; of an even number of values, the upper one of the two in the middle.
template <class Value>
Value Median(std::vector<Value> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace horovod_partial
