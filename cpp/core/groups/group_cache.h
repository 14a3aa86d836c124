// Which groups have a communicator.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <vector>

#include "core/groups/groups.h"

namespace horovod_partial {

// Every rank has the same contents: it sees all groups of every round, not only its own, in the order of the responses.
// A rank that evicted a group alone would hang the others when that group comes again. Each rank has room for
// `capacity` communicators. If there is no room, the least recently used group is evicted, on all its members at once.
class GroupCache {
 public:
  GroupCache(int size, std::size_t capacity) : capacity_(capacity), load_(static_cast<std::size_t>(size)) {}

  // A group is used. Returns the groups whose communicators must be freed before this group's is made.
  std::vector<Members> Use(const Members& group);
  bool Contains(const Members& group) const { return at_.count(group) > 0; }
  std::size_t size() const { return order_.size(); }

 private:
  const std::size_t capacity_;
  std::vector<std::size_t> load_;  // by rank: how many groups it is in
  std::list<Members> order_;       // the least recently used first
  std::map<Members, std::list<Members>::iterator> at_;
};

}  // namespace horovod_partial
