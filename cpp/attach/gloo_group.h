// A Gloo context for some of the ranks of another Gloo context.
#pragma once

#include <memory>

#include "attach/horovod.h"
#include "core/groups/groups.h"

#if HAVE_GLOO
#include <gloo/context.h>

namespace horovod_partial::attach {

// Makes the Gloo context of a group. `members` are ranks in `whole`, and include this rank. The index of a member in
// the list is its rank in the group. The group uses the connections of `whole`, so it needs no sockets and no
// rendezvous. Both contexts may use the same slots of Gloo, because all ranks begin their collectives in the same
// order, and a connection delivers the messages of a slot in order.
std::shared_ptr<gloo::Context> MakeGlooGroup(std::shared_ptr<gloo::Context> whole, const Members& members);

}  // namespace horovod_partial::attach
#endif
