// A Gloo context for some of the ranks of another one.
#pragma once

#include <memory>

#include "attach/horovod.h"
#include "core/groups.h"

#if HAVE_GLOO
#include <gloo/context.h>

namespace horovod_partial::attach {

// Members by their rank in `whole`, this rank among them; a member's place is its rank in the group. The group has no
// connections of its own: it talks over those of `whole`, so it costs no sockets and no rendezvous. The two may share
// Gloo's slots, because all ranks begin their collectives in one order, and a pair delivers a slot's messages in
// theirs.
std::shared_ptr<gloo::Context> MakeGlooGroup(std::shared_ptr<gloo::Context> whole, const Members& members);

}  // namespace horovod_partial::attach
#endif
