// The rules of the protocol, said once more in the plainest words.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "core/quorum/policy.h"
#include "core/rounds/message.h"
#include "harness/explorer.h"
#include "harness/ranks.h"

namespace horovod_partial::test {

// Checks what the coordinator decides, from what the ranks have reported in this cycle.
class Rules : protected Ranks {
 protected:
  using Ranks::Ranks;

  // 0: not at all, 1: for no time, 2: for long.
  int SinceWhen(Time since) const { return since == kNever ? 0 : since == now_ ? 1 : 2; }
  // Since when what the reports say has been so.
  void CountTime() {
    bool stuck = std::none_of(ranks_.begin(), ranks_.end(), Postponed);
    bool waiting = stuck;
    bool anybody_ended = false;
    for (const RankState& rank : ranks_) {
      waiting = waiting && (rank.joined || rank.report->blocked);
      const bool ended = rank.level == Report::Flush::kEnding;
      anybody_ended = anybody_ended || ended;
      stuck = stuck && rank.level != Report::Flush::kFlushing && (ended || CannotComeAnywhere(rank));
    }
    stuck_since_ = stuck && anybody_ended ? std::min(stuck_since_, now_) : kNever;
    waiting_since_ = waiting ? std::min(waiting_since_, now_) : kNever;
    for (Open& open : open_) open.quorate = IsQuorate(open) ? std::min(open.quorate, now_) : kNever;
  }
  bool IsQuorate(const Open& open) const {
    int active = 0;
    int arrived = 0;
    for (Rank r = 0; r < size_; ++r) {
      active += ranks_[Index(r)].joined ? 0 : 1;
      arrived += open.arrived >> r & 1;
    }
    return open.round > 0 && arrived > 0 && arrived >= std::min(job_->policy.quorum, active);
  }
  // Where the policy is a quorum, and cannot have been too stale; or ready ranks are as many as a group.
  bool MustHaveClosed(int b) const {
    const Open& open = open_[Index(b)];
    const Policy& policy = job_->policy;
    if (Runs(b) || open.full != 0 || IsFullRound(policy, open.round)) return false;
    for (const RankState& rank : ranks_) {
      if ((rank.full >> b & 1) == 0) continue;
      coverage_->held += open.quorate != kNever ? 1 : 0;
      return false;
    }
    if (policy.rule == Policy::Rule::kReady) return open.round > 0 && Count(open.arrived) >= SizeOfGroup();
    return policy.rule == Policy::Rule::kQuorum && policy.max_staleness > kMostSteps && open.quorate != kNever &&
           now_ - open.quorate >= policy.grace;
  }

  static int Count(int bits) { return (bits & 1) + (bits >> 1 & 1) + (bits >> 2 & 1); }
  int SizeOfGroup() const { return std::min(job_->policy.group_size, size_); }

  static bool IsOfAFlush(const Closing& closing) {
    return closing.reason == Closing::Reason::kFlush || closing.reason == Closing::Reason::kEnd;
  }
  // By what they said in this cycle.
  static bool IsExempt(const RankState& rank, int bucket) {
    return rank.joined || rank.report->absent.Has(NameOf(bucket));
  }
  static bool CannotCome(const RankState& rank, int bucket) {
    return IsExempt(rank, bucket) || rank.report->waiting.Has(NameOf(bucket));
  }
  static bool CannotComeAnywhere(const RankState& rank) {
    return rank.joined || rank.report->absent.all || rank.report->waiting.all;
  }

  void Check(Closing closing) {
    const int b = closing.bucket.at(0) - NameOf(0).at(0);
    Open& open = open_[Index(b)];
    const Policy& policy = job_->policy;
    using Reason = Closing::Reason;
    Require(closing.error.empty(), "a round is refused");
    Require(!Runs(b), "a round is closed while the one before has not ended everywhere");
    Require(closing.round == open.round, "a round is closed twice, or one is left out");
    for (const Running& other : running_) Require(other.bucket != b, "two rounds of a bucket are closed at once");

    Running running;
    int active = 0;
    int fresh = 0;
    int members = 0;  // a bit for each
    bool nobody_can_come = true;
    bool all_flush = true;
    bool all_end = true;
    bool drains = false;  // some rank, and is full
    for (Rank r = 0; r < size_; ++r) {
      const RankState& rank = ranks_[Index(r)];
      const Replica::Model& model = rank.replicas[Index(b)]->model;
      const Closing::Contribution& contribution = closing.contributions[Index(r)];
      if (rank.joined) {
        Require(!contribution.fresh && contribution.gradients == 0, "a joined rank contributes");
        LeaveOut(r, b, open.round + 1);
        continue;
      }
      if ((rank.full >> b & 1) != 0) {
        drains = drains || rank.drains;
        Require(closing.reason != Reason::kQuorum || IsExempt(rank, b) || (open.arrived >> r & 1) != 0,
                "a rank gets more untaken results than it may have");
      }
      ++active;
      all_flush = all_flush && rank.level != Report::Flush::kNone;
      all_end = all_end && rank.level == Report::Flush::kEnding;
      const bool arrived = (open.arrived >> r & 1) != 0;
      nobody_can_come = nobody_can_come && (arrived || CannotCome(rank, b));
      if (!closing.Includes(r)) {
        Require(!contribution.fresh && contribution.gradients == 0, "a rank contributes that is in no group");
        continue;
      }
      members |= 1 << r;
      Require(contribution.fresh == arrived, "a contribution is called fresh that is not, or not fresh that is");
      fresh += arrived ? 1 : 0;
      if (arrived) open.used[Index(r)] = model.arrival;
      running.due[Index(r)] = rank.replicas[Index(b)]->DueFrom(contribution);
      const bool again = KeepsModels() && !arrived && contribution.gradients > 0 &&
                         std::exchange(open.used[Index(r)], running.due[Index(r)]) == running.due[Index(r)];
      coverage_->sent_again += again ? 1 : 0;
      Require(contribution.gradients == 0 || contribution.stale == again,
              "a model is called stale that is not, or not stale that is");
      if (contribution.gradients > 0 && !contribution.stale) {
        open.last_contribution[Index(r)] = open.round;
      } else if (contribution.gradients > 0) {
        Require(open.round - open.last_contribution[Index(r)] <= policy.max_staleness,
                "a model is sent that is too old");
      } else if (closing.reason == Reason::kQuorum && !arrived && !IsExempt(rank, b)) {
        Require(open.round - open.last_contribution[Index(r)] <= policy.max_staleness, "the staleness bound is broken");
      }
    }
    Require(!drains || (closing.reason == Reason::kEnd && !all_end), "a round does not wait for a rank that drains");
    CheckGroups(closing, open, fresh == active);
    const bool first = closing.reason == Reason::kFirst;
    Require(first == (open.round == 0), "round 0, and no other, is closed as the first");
    if (first || closing.reason == Reason::kEverybody) Require(fresh == active, "a rank is missing in a full round");
    if (closing.reason == Reason::kQuorum) {
      Require(open.full == 0 && !IsFullRound(policy, open.round), "a full round is closed by its policy");
      Require(policy.grace == Time(0) || now_ - open.quorate >= policy.grace, "the grace period is cut short");
      if (policy.rule == Policy::Rule::kInitiator) {
        Rank initiator = Initiator(policy, open.round, size_);
        while (ranks_[Index(initiator)].joined) initiator = (initiator + 1) % size_;
        Require(closing.contributions[Index(initiator)].fresh, "the initiator is missing");
      } else if (policy.rule == Policy::Rule::kQuorum) {
        Require(fresh >= std::min(policy.quorum, active), "the quorum is not reached");
      }
    }
    if (closing.reason == Reason::kLiveness) {
      Require(fresh > 0 && nobody_can_come, "a round is closed by liveness while a rank may come");
      Require(running_.empty(), "another round is closed beside one by liveness");
    }
    if (closing.reason == Reason::kEnd && !all_end) {
      Require(stuck_since_ != kNever && now_ - stuck_since_ >= kLong, "ended ranks leave while others may come");
      abandoned_ = true;
      ++coverage_->abandoned;
    } else if (IsOfAFlush(closing)) {
      Require(all_flush && fresh == 0, "a flush while a rank works");
      Require((closing.reason == Reason::kEnd) == all_end, "the end is called before all have come to it");
    }
    waiting_since_ = kNever;
    ++coverage_->closings[static_cast<std::size_t>(closing.reason)];
    coverage_->pending_delivered += static_cast<std::size_t>(closing.gradients() > fresh);
    open.arrived &= ~members;
    open.full &= ~members;
    open.quorate = kNever;
    open.round += members != 0 || !policy.grouped() ? 1 : 0;  // with groups a flush has nothing to deliver
    for (const Sum due : running.due) open.delivered += due;
    Require(KeepsModels() || !HasDuplicates(open.delivered), "a contribution is delivered twice");
    running.bucket = b;
    running.closing = std::make_shared<const Closing>(std::move(closing));
    running_.push_back(std::move(running));
  }

  // Who reduces together, by the policy.
  void CheckGroups(const Closing& closing, Open& open, bool everybody) const {
    const Policy& policy = job_->policy;
    if (closing.groups.empty()) {
      const bool full = open.full != 0 || IsFullRound(policy, open.round);
      Require(
          !policy.grouped() || open.round == 0 || (full && (everybody || closing.reason != Closing::Reason::kQuorum)),
          "a round has no groups");
      return;
    }
    Require(policy.grouped() && open.round > 0, "a round has groups");
    if (IsOfAFlush(closing)) {
      for (const int group : closing.groups) Require(group == kNoGroup, "a flush has groups");
    } else if (policy.rule != Policy::Rule::kReady) {
      Require(closing.groups == GroupsOf(policy.schedule, open.round, size_), "the groups are not the schedule's");
    } else {
      for (const Members& group : GroupsOf(closing.groups)) {
        int bits = 0;
        for (const Rank rank : group) bits |= 1 << rank;
        Require((bits & ~open.arrived) == 0, "a group has ranks that are not ready");
        Require(Count(bits) <= SizeOfGroup(), "a group is too large");
        Require(Count(bits) == SizeOfGroup() || closing.reason == Closing::Reason::kLiveness, "a group is too small");
        open.groups.push_back(bits);
      }
    }
  }
};

}  // namespace horovod_partial::test
