// The messages between ranks and coordinator, and their encoding.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/groups/groups.h"
#include "core/quorum/quorum_guard.h"
#include "core/rounds/declaration.h"
#include "core/rounds/work_sharing.h"
#include "core/values/types.h"

namespace horovod_partial {

// A set of buckets of a rank.
struct BucketSet {
  bool all = false;                // all its buckets, also those that it has not used yet
  std::vector<std::string> names;  // sorted; empty if `all`

  bool empty() const { return !all && names.empty(); }
  bool Has(const std::string& bucket) const;
  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("all", self.all), Named("names", self.names));
  }
  bool operator==(const BucketSet& other) const { return Fields(*this) == Fields(other); }
};

// Each rank sends one to the coordinator in every negotiating cycle. Arrivals and a failure are events. All else is a
// level: it replaces what the rank said in the cycle before. A rank that sends nothing has nothing pending, can
// contribute to every bucket, and does not flush.
struct Report {
  enum class Flush : std::uint8_t {
    kNone,
    kFlushing,  // waits until all late contributions of all ranks are delivered
    kEnding,    // the same, and will contribute nothing any more
  };
  // How many results of a bucket the application has not taken.
  enum class Backlog : std::uint8_t {
    kNone,      // fewer than the limit
    kFull,      // as many as the limit: rounds wait for this rank
    kDraining,  // the same, but the application takes them now, in a flush or another wait
  };
  struct Item {
    enum class Kind : std::uint8_t {
      kArrival,
      kPending,
      kRunning,  // a round of this bucket is still being reduced here; on a device that may take several cycles
      kRetired,  // no thread here will contribute to this bucket, which is idle; else as kPending
    };
    Kind kind = Kind::kArrival;
    std::string bucket;
    int gradients = 0;  // gradients or models in this contribution; may be 0 if an arrival only delivers
    int late = 0;       // kPending: late arrivals in it that no round has seen; may be 0 for a kept model
    int work = 0;       // kArrival: the number that its weight follows from, steps or an iteration
    Time age{0};        // since this rank's last arrival; needed because no report travels while a reduction runs
    bool full = false;  // kArrival: the round must not close before every rank has arrived
    std::optional<Share> share;  // only for a bucket that keeps the grants
    Backlog backlog = Backlog::kNone;
    std::optional<Declaration> declaration;  // with arrivals, until this rank has seen a round of the bucket

    template <class Self>
    static auto Fields(Self& self) {
      return std::make_tuple(Named("kind", self.kind), Named("bucket", self.bucket), Named("gradients", self.gradients),
                             Named("late", self.late), Named("work", self.work), Named("age", self.age),
                             Named("full", self.full), Named("share", self.share), Named("backlog", self.backlog),
                             Named("declaration", self.declaration));
    }
    bool operator==(const Item& other) const { return Fields(*this) == Fields(other); }
  };

  // Buckets to which the rank has not arrived and cannot contribute. waiting: all their bringers wait, for a round or
  // in a flush, of this or another process set. absent: all their bringers wait or are out of training, in one of
  // Horovod's collectives or in a flush, and at least one of them is out of training.
  BucketSet absent;
  BucketSet waiting;
  bool blocked = false;   // all known threads of this rank wait or are out of training; never set because of silence
  std::string elsewhere;  // if blocked: the round 0, or the flush, of another process set in which this rank waits
  Flush flush = Flush::kNone;
  std::vector<Item> items;
  bool leaves = false;  // this rank begins no micro-batch until it says otherwise, and has none in progress
  std::string failure;  // not empty: why this rank's application ends. No decision depends on it

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("absent", self.absent), Named("waiting", self.waiting), Named("blocked", self.blocked),
                           Named("elsewhere", self.elsewhere), Named("flush", self.flush), Named("items", self.items),
                           Named("leaves", self.leaves), Named("failure", self.failure));
  }
  bool operator==(const Report& other) const { return Fields(*this) == Fields(other); }
  bool empty() const { return *this == Report{}; }
};

// The prefix of the names of buckets in which ranks compare their replicas during a flush. A flush has nothing to
// deliver in them, and does not wait for them.
inline constexpr std::string_view kOfFlushes = "horovod_partial.replicas.";
inline bool IsOfFlushes(const std::string& bucket) { return bucket.compare(0, kOfFlushes.size(), kOfFlushes) == 0; }

constexpr auto NamesOf(Report::Flush /*type*/) { return std::array{"none", "flushing", "ending"}; }
constexpr auto NamesOf(Report::Backlog /*type*/) { return std::array{"none", "full", "draining"}; }
constexpr auto NamesOf(Report::Item::Kind /*type*/) { return std::array{"arrival", "pending", "running", "retired"}; }

// The coordinator sends it to all ranks: one round of one bucket is closed.
struct Closing {
  enum class Reason : std::uint8_t {
    kFirst,      // round 0, the handshake: every rank has arrived
    kEverybody,  // no rank was missing
    kQuorum,     // the policy was satisfied, and the grace period is over
    kLiveness,   // no missing rank can come (docs/protocol.md, rule 7)
    kFlush,      // every rank waits in a flush
    kEnd,        // every rank has ended, or the bucket ends
  };
  struct Contribution {
    int gradients = 0;   // gradients or models of this rank in the sum
    bool fresh = false;  // the rank has arrived; otherwise only its pending contributions are in the sum
    bool stale = false;  // this contribution was in the sum of an earlier round too, which a kept model may be
    int work = 0;        // as reported
  };

  std::string bucket;
  Round round = 0;
  Reason reason = Reason::kQuorum;
  bool flushes = false;  // the first closing of this bucket in a flush; it delivers what was pending
  bool ends = false;     // the last round of this bucket: all ranks have retired it, and forget it
  Report::Flush flush_over = Report::Flush::kNone;  // not kNone: the last closing of a flush of this kind
  int quorum = 0;                                   // kAuto: the quorum of this round; 0: another policy
  QuorumGuard::Why why = QuorumGuard::Why::kStart;  // kAuto: why that quorum was chosen
  std::vector<Contribution> contributions;          // one for each rank
  Partition groups;                                 // each group reduces by itself
  std::vector<Partition> upcoming;                  // round 0 of a schedule: the partitions of later rounds
  std::string error;                                // not empty: nothing is reduced, and every rank gets this text

  // For the whole round, or for the group of one rank.
  int fresh() const;
  int fresh(Rank rank) const;
  int gradients() const;
  int gradients(Rank rank) const;
  Members members(Rank rank) const;
  bool Includes(Rank rank) const;
};

constexpr auto NamesOf(Closing::Reason /*type*/) {
  return std::array{"first", "everybody", "quorum", "liveness", "flush", "end"};
}
const char* NameOf(Closing::Reason reason);

// The coordinator sends it to all ranks: which micro-batches of the open update each rank may begin.
struct Grants {
  std::string bucket;  // the bucket that keeps the grants
  std::vector<MicroBatches> by_rank;

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("bucket", self.bucket), Named("by_rank", self.by_rank));
  }
  bool operator==(const Grants& other) const { return Fields(*this) == Fields(other); }
};

// Grants travel as a string of bytes. Decoding a damaged one throws std::runtime_error.
std::string Encode(const std::vector<Grants>& grants);
std::vector<Grants> DecodeGrants(const std::string& bytes);

// A report travels as a string of bytes; decoding a damaged one throws std::runtime_error.
std::string Encode(const Report& report);
Report DecodeReport(const std::string& bytes);
// Throws std::runtime_error if no rank of a process set with `size` ranks can have sent this.
void Check(const Report& report, int size);

// A closing travels as 32-bit integers (Horovod's responses have room for those), without its name and error, which
// the response holds already. DecodeClosing reads one from `at`, and moves `at` behind it.
void Append(const Closing& closing, std::vector<std::int32_t>& words);
Closing DecodeClosing(const std::vector<std::int32_t>& words, std::size_t& at);

}  // namespace horovod_partial
