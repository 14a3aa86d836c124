// The messages between the ranks and the coordinator, and how they are encoded.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/groups/groups.h"
#include "core/rounds/declaration.h"
#include "core/rounds/work_sharing.h"
#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

// A set of buckets that a rank names in its report.
struct BucketSet {
  bool all = false;                // true if the set has all buckets, including those that the rank has not used yet
  std::vector<std::string> names;  // the buckets' names, sorted; empty if `all` is true

  bool empty() const { return !all && names.empty(); }
  bool Has(const std::string& bucket) const;
  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("all", self.all), Named("names", self.names));
  }
};

// A report, which each rank sends to the coordinator in every negotiating cycle. A report has an arrival only if that
// is new or has changed, and a failure only once. Everything else replaces what the last report said. A rank that sends
// no report has nothing pending, can arrive at every bucket, and is in no flush.
struct Report {
  enum class Flush : std::uint8_t {
    kNone,
    kFlushing,  // the rank waits until all late contributions of all ranks are delivered
    kEnding,    // the rank has ended, and waits until all late contributions of all ranks are delivered
  };
  // Whether the rank has as many untaken results of a bucket as it may have.
  enum class Backlog : std::uint8_t {
    kNone,      // the rank has fewer untaken results of the bucket than it may have
    kFull,      // the rank has as many untaken results of the bucket as it may have, so rounds wait for it
    kDraining,  // the rank has as many untaken results as it may have, but takes them now, in a flush or another wait
  };
  struct Item {
    enum class Kind : std::uint8_t {
      kArrival,
      kPending,
      kRunning,  // a round of the bucket is still being reduced on this rank; on a device that may take several cycles
      kRetired,  // the bucket's owner (an optimizer) is gone here; `gradients` and `late` say what is still pending
    };
    Kind kind = Kind::kArrival;
    std::string bucket;
    int gradients = 0;  // the number of gradients or models that the rank can contribute, pending ones included
    int late = 0;       // pending sums only: the number of late arrivals whose contributions are in no round yet
    int work = 0;       // arrivals only: the number of steps, or the iteration, from which the rank's weight follows
    Time age{0};        // the time since the rank last arrived; may be long, as no report is sent during a reduction
    bool full = false;  // arrivals only: true if the round must not close before every rank has arrived
    std::optional<Share> share;  // the rank's micro-batches; set only under work sharing, in one bucket of an optimizer
    Backlog backlog = Backlog::kNone;
    std::optional<Declaration> declaration;  // sent with each arrival until this rank has seen a round of the bucket

    template <class Self>
    static auto Fields(Self& self) {
      return std::make_tuple(Named("kind", self.kind), Named("bucket", self.bucket), Named("gradients", self.gradients),
                             Named("late", self.late), Named("work", self.work), Named("age", self.age),
                             Named("full", self.full), Named("share", self.share), Named("backlog", self.backlog),
                             Named("declaration", self.declaration));
    }
  };

  // Buckets at which the rank has not arrived and cannot arrive. A bucket is in `waiting` if all its threads wait, for
  // a round or in a flush of any process set. A bucket is in `absent` if all its threads wait or take no part in
  // training (ended, joined, or in another collective), and at least one takes no part. (The threads of a bucket took
  // its last results.)
  BucketSet absent;
  BucketSet waiting;
  bool blocked = false;   // true if all known threads of this rank wait or take no part in training
  std::string elsewhere;  // where a blocked rank waits in another process set, in words; otherwise empty
  Flush flush = Flush::kNone;
  std::vector<Item> items;
  bool leaves = false;  // true if this rank has no micro-batch in progress, and begins none until it reports false
  std::string failure;  // why the application of this rank fails, or empty; no decision depends on it

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("absent", self.absent), Named("waiting", self.waiting), Named("blocked", self.blocked),
                           Named("elsewhere", self.elsewhere), Named("flush", self.flush), Named("items", self.items),
                           Named("leaves", self.leaves), Named("failure", self.failure));
  }
  bool empty() const { return *this == Report{}; }
};

// The prefix of the names of buckets in which ranks compare their replicas during a flush. These buckets have nothing
// to deliver, so a flush closes no round of them and does not wait for them.
inline constexpr std::string_view kOfFlushes = "horovod_partial.replicas.";
inline bool IsOfFlushes(const std::string& bucket) { return bucket.compare(0, kOfFlushes.size(), kOfFlushes) == 0; }

constexpr auto NamesOf(Report::Flush /*type*/) { return std::array{"none", "flushing", "ending"}; }
constexpr auto NamesOf(Report::Backlog /*type*/) { return std::array{"none", "full", "draining"}; }
constexpr auto NamesOf(Report::Item::Kind /*type*/) { return std::array{"arrival", "pending", "running", "retired"}; }

// The coordinator's message to all ranks that one round of one bucket is closed.
struct Closing {
  enum class Reason : std::uint8_t {
    kFirst,      // the round is round 0, and every rank has arrived
    kEverybody,  // every rank that has not joined has arrived
    kQuorum,     // the policy was satisfied, and the grace period is over
    kLiveness,   // no missing rank can arrive (docs/protocol.md, rule 7)
    kFlush,      // every rank waits in a flush
    kEnd,        // every rank has ended, or the bucket ends
  };
  struct Contribution {
    int gradients = 0;   // the number of gradients or models of this rank in the sum
    bool fresh = false;  // true if the rank has arrived; otherwise only its pending contributions are in the sum
    bool stale = false;  // true for a kept model that was in the sum of an earlier round too
    int work = 0;        // the number of steps, or the iteration, from which the weight of the rank's model follows

    template <class Self>
    static auto Fields(Self& self) {
      return std::make_tuple(Named("gradients", self.gradients), Named("fresh", self.fresh), Named("stale", self.stale),
                             Named("work", self.work));
    }
  };

  std::string bucket;
  Round round = 0;
  Reason reason = Reason::kQuorum;
  bool flushes = false;  // true for the first round of the bucket in a flush, which delivers what was pending
  bool ends = false;     // true for the last round of the bucket, after which all ranks forget the bucket
  Report::Flush flush_over = Report::Flush::kNone;  // the kind of the flush that ends with this round, or kNone
  std::vector<Contribution> contributions;          // the contribution of each rank
  Partition groups;                                 // the groups of the round; each group reduces by itself
  std::vector<Partition> upcoming;                  // in round 0, if there is a schedule: the groups of later rounds
  std::string error;                                // an error that every rank gets (then nothing is reduced), or empty

  // All but `bucket` and `error`, because the response in which a Closing travels has both already.
  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("round", self.round), Named("reason", self.reason), Named("flushes", self.flushes),
                           Named("ends", self.ends), Named("flush_over", self.flush_over),
                           Named("contributions", self.contributions), Named("groups", self.groups),
                           Named("upcoming", self.upcoming));
  }

  // The number of ranks on time, and of gradients in the sum: in the group of `rank`, or without `rank` of all ranks.
  int fresh(std::optional<Rank> rank = std::nullopt) const;
  int gradients(std::optional<Rank> rank = std::nullopt) const;
  Members members(Rank rank) const { return GroupOf(groups, rank, static_cast<int>(contributions.size())); }
  bool Includes(Rank rank) const { return groups.empty() || groups.at(Index(rank)) != kNoGroup; }
};

constexpr auto NamesOf(Closing::Reason /*type*/) {
  return std::array{"first", "everybody", "quorum", "liveness", "flush", "end"};
}

// The coordinator's message to all ranks: which micro-batches of the open update each rank may begin.
struct Grants {
  std::string bucket;  // the optimizer's micro-batches are counted and granted in this bucket, and in no other
  std::vector<MicroBatches> by_rank;

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("bucket", self.bucket), Named("by_rank", self.by_rank));
  }
};

// Throws std::runtime_error if no rank of a process set with `size` ranks can have sent this report.
void Check(const Report& report, int size);

// A Closing travels as 32-bit integers, for which Horovod's responses have room: the number of its bytes, and these
// bytes. DecodeClosing reads the Closing at index `at`, and moves `at` behind it. Throws std::runtime_error for damage.
void Append(const Closing& closing, std::vector<std::int32_t>& words);
Closing DecodeClosing(const std::vector<std::int32_t>& words, std::size_t& at);

}  // namespace horovod_partial
