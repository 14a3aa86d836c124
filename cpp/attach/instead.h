// Replaces the value of a variable for a while.
#pragma once

#include <utility>

namespace horovod_partial::attach {

// While an object of this class lives, `place` holds `value`. Afterwards it holds its old value again.
template <class T>
class Instead {
 public:
  Instead(T& place, T value) : place_(place), old_(std::exchange(place, std::move(value))) {}
  ~Instead() { place_ = std::move(old_); }
  Instead(const Instead&) = delete;
  Instead& operator=(const Instead&) = delete;

 private:
  T& place_;
  T old_;
};

}  // namespace horovod_partial::attach
