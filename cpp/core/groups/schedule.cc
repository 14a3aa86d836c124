#include "core/groups/schedule.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <stdexcept>

namespace horovod_partial {
namespace {

bool IsPowerOfTwo(int value) { return value > 0 && (value & (value - 1)) == 0; }

int Log2(int value) {
  int bits = 0;
  while (value > 1 << bits) ++bits;
  return bits;
}

// Returns base^digits. So that nothing overflows, the power stops growing when it has reached `size`.
std::int64_t PowerUpTo(int base, int digits, int size) {
  std::int64_t power = 1;
  for (int i = 0; i < digits && power < size; ++i) power *= base;
  return power;
}

struct Digits {
  int count;
  int base;
};

Digits DigitsFor(int size, int group_size) {
  Digits digits{1, group_size};
  if (group_size < 2) return {1, 1};
  while (PowerUpTo(group_size, digits.count, size) < size) ++digits.count;
  while (digits.base > 2 && PowerUpTo(digits.base - 1, digits.count, size) >= size) --digits.base;
  return digits;
}

// Gives a group number to each rank by its key. Ranks with equal keys are in one group. Groups are numbered in the
// order of their first ranks.
Partition Numbered(const std::vector<std::int64_t>& keys) {
  std::map<std::int64_t, int> numbers;
  Partition partition;
  for (const std::int64_t key : keys)
    partition.push_back(numbers.emplace(key, static_cast<int>(numbers.size())).first->second);
  return partition;
}

Partition Butterfly(int group_size, Round round, int size) {
  std::vector<std::int64_t> keys;
  if (IsPowerOfTwo(size) && IsPowerOfTwo(group_size)) {
    const int phases = Log2(size);
    const int group_phases = Log2(group_size);
    int mask = 0;
    for (int phase = 0; phase < group_phases; ++phase) mask |= 1 << ((round % phases * group_phases + phase) % phases);
    for (Rank rank = 0; rank < size; ++rank) keys.push_back(rank & ~mask);
    return Numbered(keys);
  }
  const Digits digits = DigitsFor(size, group_size);
  std::int64_t unit = 1;
  for (Round i = round % digits.count; i > 0; --i) unit *= digits.base;
  for (Rank rank = 0; rank < size; ++rank)
    keys.push_back(digits.base > 1 ? rank - rank / unit % digits.base * unit : rank);
  return Numbered(keys);
}

}  // namespace

Round CycleOf(const Schedule& schedule, int size) {
  const int group_size = std::min(schedule.group_size, size);
  switch (schedule.kind) {
    case Schedule::Kind::kNone: return 0;
    case Schedule::Kind::kButterfly:
      if (!IsPowerOfTwo(size) || !IsPowerOfTwo(group_size)) return DigitsFor(size, group_size).count;
      if (group_size == 1 || group_size == size) return 1;
      return Log2(size) / std::gcd(Log2(size), Log2(group_size));
    case Schedule::Kind::kTable: return static_cast<Round>(schedule.table.size());
  }
  throw std::invalid_argument("unknown kind of schedule");
}

Partition GroupsOf(const Schedule& schedule, Round round, int size) {
  const int group_size = std::min(schedule.group_size, size);
  switch (schedule.kind) {
    case Schedule::Kind::kNone: return {};
    case Schedule::Kind::kButterfly: return Butterfly(group_size, round, size);
    case Schedule::Kind::kTable: return schedule.table.at(static_cast<std::size_t>(round % CycleOf(schedule, size)));
  }
  throw std::invalid_argument("unknown kind of schedule");
}

}  // namespace horovod_partial
