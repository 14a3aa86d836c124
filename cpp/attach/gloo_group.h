// A Gloo context for some of the ranks of another one.
#pragma once

#include <memory>

#include "attach/horovod.h"
#include "core/groups/groups.h"

#if HAVE_GLOO
#include <gloo/context.h>

namespace horovod_partial::attach {

// Makes the context of a group. `members` are ranks in `whole`, and include this rank; a member's place in the list is
// its rank in the group. The group talks over the connections of `whole`, so it costs no sockets and no rendezvous.
// Both may use the same Gloo slots, because all ranks begin their collectives in the same order, and a pair delivers
// the messages of a slot in order.
std::shared_ptr<gloo::Context> MakeGlooGroup(std::shared_ptr<gloo::Context> whole, const Members& members);

}  // namespace horovod_partial::attach
#endif
