// What ranks and coordinator tell each other, and how it travels.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/declaration.h"
#include "core/groups.h"
#include "core/quorum_guard.h"
#include "core/types.h"
#include "core/work_sharing.h"

namespace horovod_partial {

// Some of the buckets that a rank uses.
struct BucketSet {
  bool all = false;                // and those that it has not used yet
  std::vector<std::string> names;  // in order; none if all

  bool empty() const { return !all && names.empty(); }
  bool Has(const std::string& bucket) const;
  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("all", self.all), Named("names", self.names));
  }
  bool operator==(const BucketSet& other) const { return Fields(*this) == Fields(other); }
};

// Rank to coordinator, once in every negotiating cycle. Arrivals are events; all else are levels, which replace what
// the rank said in the cycle before. A rank that sends nothing has said "nothing pending, I can come everywhere, no
// flush".
struct Report {
  enum class Flush : std::uint8_t {
    kNone,
    kFlushing,  // waits until everything pending, anywhere, is delivered
    kEnding,    // the same, and will submit nothing any more
  };
  // Results that the application has not taken.
  enum class Backlog : std::uint8_t {
    kNone,      // there is room for more
    kFull,      // as many as there may be
    kDraining,  // and the application takes them now, while it waits in a flush
  };
  struct Item {
    enum class Kind : std::uint8_t {
      kArrival,
      kPending,
      kRunning,  // a round of this bucket is still being reduced here, as a device does it, behind the cycles
      kRetired,  // nobody is left here who would come to this bucket, which is idle; the rest is as with kPending
    };
    Kind kind = Kind::kArrival;
    std::string bucket;
    int gradients = 0;           // or models, in this contribution; an arrival that only delivers may have none
    int late = 0;                // kPending: late arrivals in it that no round has seen; a kept model may have none
    int work = 0;                // kArrival: what its weight follows from, steps or an iteration
    Time age{0};                 // since this rank's last arrival: no report travels while a reduction runs
    bool full = false;           // an arrival whose round must not close before every rank has arrived
    std::optional<Share> share;  // of a bucket that keeps the grants
    Backlog backlog = Backlog::kNone;
    std::optional<Declaration> declaration;  // with an arrival of a rank that has not seen a round of this bucket
  };

  // Buckets that the rank has not arrived at and cannot come to: all who could bring something are out of training, in
  // a collective of Horovod's or a flush; or wait, for a round of this or another process set.
  BucketSet absent;
  BucketSet waiting;
  bool blocked = false;   // all of this rank that is known waits so, for certain: not just because it has been silent
  std::string elsewhere;  // if blocked: the round 0 or the flush of another process set that this rank waits in
  Flush flush = Flush::kNone;
  std::vector<Item> items;
  bool leaves = false;  // this rank begins no micro-batch until it says otherwise, and none that it has begun is open
  std::string failure;  // this rank's application ends by it; an event. No decision depends on it

  bool empty() const {
    return absent.empty() && waiting.empty() && !blocked && flush == Flush::kNone && items.empty() && !leaves &&
           failure.empty();
  }
};

// Buckets with such names are there for flushes, in which ranks compare their replicas. A flush has nothing to deliver
// there, and nobody waits in one because of them.
inline constexpr std::string_view kOfFlushes = "horovod_partial.replicas.";
inline bool IsOfFlushes(const std::string& bucket) { return bucket.compare(0, kOfFlushes.size(), kOfFlushes) == 0; }

constexpr auto NamesOf(Report::Flush /*type*/) { return std::array{"none", "flushing", "ending"}; }
constexpr auto NamesOf(Report::Backlog /*type*/) { return std::array{"none", "full", "draining"}; }
constexpr auto NamesOf(Report::Item::Kind /*type*/) { return std::array{"arrival", "pending", "running", "retired"}; }

// Coordinator to all ranks: one round of one bucket is closed.
struct Closing {
  enum class Reason : std::uint8_t {
    kFirst,      // round 0: always full, it is the handshake
    kEverybody,  // no rank was missing
    kQuorum,     // the policy was satisfied, and the grace period is over
    kLiveness,   // nobody who is missing can come (docs/protocol.md, rule 7)
    kFlush,      // every rank waits in a flush
    kEnd,        // every rank has ended, or the bucket has
  };
  struct Contribution {
    int gradients = 0;   // or models, in the sum from this rank
    bool fresh = false;  // it arrived; otherwise only what it had pending is in the sum
    bool stale = false;  // what is in the sum has been in another round's sum already, as a kept model may have been
    int work = 0;        // as reported
  };

  std::string bucket;
  Round round = 0;
  Reason reason = Reason::kQuorum;
  bool flushes = false;  // the first one of this bucket in a flush, which delivers what was pending
  bool ends = false;     // the last one of this bucket: all ranks have retired it, and forget it
  Report::Flush flush_over = Report::Flush::kNone;  // and the last one of that flush
  int quorum = 0;                                   // kAuto: that held in this round; 0: the policy is another one
  QuorumGuard::Why why = QuorumGuard::Why::kStart;  // kAuto: and since when it holds
  std::vector<Contribution> contributions;          // one for each rank
  Partition groups;                                 // each reduces by itself
  std::vector<Partition> upcoming;                  // round 0 of a schedule: partitions that later rounds will have
  std::string error;                                // not empty: no reduction takes place, every rank gets this text

  // Of the whole round, or of the group that a rank is in.
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

// Coordinator to all ranks: which micro-batches of the open update each may begin.
struct Grants {
  std::string bucket;  // that keeps them
  std::vector<MicroBatches> by_rank;

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("bucket", self.bucket), Named("by_rank", self.by_rank));
  }
  bool operator==(const Grants& other) const { return Fields(*this) == Fields(other); }
};

// Both travel as a string of bytes; decoding a damaged one throws std::runtime_error.
std::string Encode(const std::vector<Grants>& grants);
std::vector<Grants> DecodeGrants(const std::string& bytes);

// A report travels as a string of bytes; decoding a damaged one throws std::runtime_error.
std::string Encode(const Report& report);
Report DecodeReport(const std::string& bytes);
// Throws std::runtime_error if no rank of `size` can have sent this.
void Check(const Report& report, int size);

// A closing travels as 32-bit integers (Horovod's responses have room for those), without its name and error, which
// the response holds already. DecodeClosing reads one from `at`, and moves `at` behind it.
void Append(const Closing& closing, std::vector<std::int32_t>& words);
Closing DecodeClosing(const std::vector<std::int32_t>& words, std::size_t& at);

}  // namespace horovod_partial
