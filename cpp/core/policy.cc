#include "core/policy.h"

namespace horovod_partial {

bool IsFullRound(const Policy& policy, Round round) { return policy.period > 0 && (round + 1) % policy.period == 0; }

Rank Initiator(const Policy& policy, Round round, int size) {
  // SplitMix64 of (seed, round): draws of different rounds are independent, and none depends on an earlier one.
  std::uint64_t x = policy.seed + 0x9e3779b97f4a7c15u * (static_cast<std::uint64_t>(round) + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return static_cast<Rank>(x % static_cast<std::uint64_t>(size));
}

}  // namespace horovod_partial
