// Divides the ranks into groups that follow from the number of the round alone.
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
    kNone,       // all ranks reduce together
    kButterfly,  // the dynamic grouping of WAGMA-SGD (IEEE TPDS 2021, section 3.2)
    kTable,      // round r has the groups of row r modulo the number of rows in `table`
  };
  Kind kind = Kind::kNone;
  int group_size = 0;            // for kButterfly: the number of ranks in a group, 1 or more
  std::vector<Partition> table;  // for kTable: each row has the number of the group of every rank

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("kind", self.kind), Named("group_size", self.group_size), Named("table", self.table));
  }
};

constexpr auto NamesOf(Schedule::Kind /*type*/) { return std::array{"none", "butterfly", "table"}; }

// Returns the number of rounds after which the groups of ranks repeat. It is 0 if all ranks reduce together (kNone).
Round CycleOf(const Schedule& schedule, int size);

// Returns the groups of a round among `size` ranks. The result is empty for kNone.
//
// kButterfly, if both sizes are powers of two: round t groups the ranks that differ only in log2(group_size) bits of
// their number, cyclically from bit s = (t * log2(group_size)) mod log2(size) on. So a change on one rank has reached
// all ranks after log(size) / log(group_size) rounds. (Algorithm 1 in the paper shifts the mask of the round before by
// s bits. In the paper's example the mask of round t is 1, shifted by s bits. The code follows the example.)
//
// kButterfly with other sizes: K is the smallest number with group_size^K >= size. The numbers of ranks are written
// with K digits in the smallest base that is enough. Round t groups the ranks that differ only in digit t mod K. The
// groups differ in size, but no group is larger than group_size.
Partition GroupsOf(const Schedule& schedule, Round round, int size);

}  // namespace horovod_partial
