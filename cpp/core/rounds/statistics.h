// Counts what happened to the rounds of one bucket, from the closings that every rank receives.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "core/rounds/message.h"
#include "core/values/types.h"

namespace horovod_partial {

struct BucketStatistics {
  // The round from which an adaptive quorum has held, and why it was chosen.
  struct QuorumChange {
    Round round = 0;
    int quorum = 0;
    QuorumGuard::Why why = QuorumGuard::Why::kStart;
  };
  static constexpr std::size_t kMostChanges = 64;

  // A rank is on time in a round if its fresh contribution is in it. A rank in no group is neither on time nor late.
  // Staleness is counted for each contribution: the rounds since the rank's last one, 0 if that was one round before.
  void Record(const Closing& closing);

  std::int64_t rounds = 0;
  std::array<std::int64_t, 6> by_reason{};  // indexed by Closing::Reason
  std::vector<std::int64_t> on_time;        // by rank
  std::vector<std::int64_t> late;           // by rank
  std::vector<std::int64_t> gradients;      // by rank, in all sums; micro-batches if work is shared
  std::vector<std::int64_t> fresh;          // fresh[n]: rounds with n fresh contributors
  std::map<Round, std::int64_t> staleness;  // number of contributions by staleness
  std::deque<QuorumChange> quorums;         // kAuto: the last changes, oldest first
  double waited_seconds = 0;                // time that this rank's application has waited for results
  double setup_seconds = 0;                 // time for making groups' communicators on this rank; not part of any round
  std::int64_t groups_made = 0;             // number of communicators that were made
  std::int64_t dropped = 0;                 // late contributions of this rank that were not finite
  std::int64_t summed = 0;                  // missed results of this rank that had to be added to others

 private:
  std::vector<Round> last_contribution_;
};

}  // namespace horovod_partial
