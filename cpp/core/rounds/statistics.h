// Counts what happened to the rounds of one bucket, from the Closing messages that every rank receives.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "core/rounds/message.h"
#include "core/values/types.h"

namespace horovod_partial {

struct BucketStatistics {
  // Counts a closed round. A rank with an arrival in the round is on time. A rank without a group is neither on time
  // nor late. The staleness of a contribution is the number of rounds between it and the rank's previous contribution.
  void Record(const Closing& closing);

  std::int64_t rounds = 0;
  std::array<std::int64_t, 6> by_reason{};  // the number of rounds for each Closing::Reason
  std::vector<std::int64_t> on_time;        // for each rank: the number of rounds in which it was on time
  std::vector<std::int64_t> late;           // for each rank: the number of rounds in which it was late
  std::vector<std::int64_t> gradients;      // for each rank: the number of its gradients or micro-batches in all sums
  std::vector<std::int64_t> fresh;          // fresh[n]: the number of rounds in which n ranks were on time
  std::map<Round, std::int64_t> staleness;  // the number of contributions by staleness
  double waited_seconds = 0;                // how long the application of this rank has waited for results
  double setup_seconds = 0;                 // how many seconds this rank spent on making communicators for groups
  std::int64_t groups_made = 0;             // the number of communicators that were made for groups
  std::int64_t dropped = 0;  // the number of late contributions of this rank that were not finite, so they were dropped
  std::int64_t healed = 0;   // how often a flush has replaced this rank's model, because it differed from others
  std::int64_t summed = 0;   // the number of missed results of this rank that were added to another result

 private:
  std::vector<Round> last_contribution_;
};

}  // namespace horovod_partial
