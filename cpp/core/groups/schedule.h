// Groups that depend on the number of the round only.
#pragma once

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "core/groups/groups.h"
#include "core/values/fields.h"
#include "core/values/types.h"

namespace horovod_partial {

struct Schedule {
  enum class Kind : std::uint8_t {
    kNone,       // all ranks together
    kButterfly,  // WAGMA-SGD's dynamic grouping (IEEE TPDS 2021, section 3.2)
    kTable,      // the partitions in turn, then from the start again
  };
  Kind kind = Kind::kNone;
  int group_size = 0;            // kButterfly: 1 or more
  std::vector<Partition> table;  // kTable: each as long as there are ranks, every rank in a group

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("kind", self.kind), Named("group_size", self.group_size), Named("table", self.table));
  }
  bool operator==(const Schedule& other) const { return Fields(*this) == Fields(other); }
};

constexpr auto NamesOf(Schedule::Kind /*type*/) { return std::array{"none", "butterfly", "table"}; }

// After how many rounds the groups repeat; 0 for kNone.
Round CycleOf(const Schedule& schedule, int size);

// The groups of a round among `size` ranks; empty for kNone.
//
// kButterfly, if size and group_size are powers of two: round t combines log2(group_size) bits of the rank, cyclically
// from bit (t * log2(group_size)) mod log2(size) on. So a change on one rank has reached all others after log(size) /
// log(group_size) rounds. (The paper's Algorithm 1 shifts its mask by that much in every round, but its own example
// contradicts that; the mask is 1 << shift.) Other sizes: K is the smallest number with group_size^K >= size. Ranks are
// written with K digits, in the smallest base that is enough. Round t combines the ranks that differ only in digit t
// mod K. Groups then differ in size, but none is larger than group_size.
Partition GroupsOf(const Schedule& schedule, Round round, int size);

}  // namespace horovod_partial
