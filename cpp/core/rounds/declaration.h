// A rank's description of a bucket, sent until the rank has seen a round of the bucket. All ranks must agree on it.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/quorum/policy.h"
#include "core/values/dtype.h"
#include "core/values/fields.h"
#include "core/values/memory.h"

namespace horovod_partial {

struct Declaration {
  Policy policy;
  DataType type = DataType::kFloat32;
  std::vector<std::int64_t> shape = {};
  // Where the rank's tensor lies. Device numbers may differ between ranks, but host and device must not be mixed.
  int device = Memory::kHost;
  double prescale_factor = 1;
  double postscale_factor = 1;
  std::vector<std::string> members = {};  // the name and the shape of each tensor in the bucket; errors show them

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("policy", self.policy), Named("type", self.type), Named("shape", self.shape),
                           Named("device", self.device), Named("prescale_factor", self.prescale_factor),
                           Named("postscale_factor", self.postscale_factor), Named("members", self.members));
  }
};

// Returns a text that says why two declarations do not agree, in Horovod's words if it has some. The text is empty if
// they agree. `first` and `second` name the ranks, for example "rank 0".
std::string Disagreement(const std::string& first, const Declaration& one, const std::string& second,
                         const Declaration& other);

// Returns a text with all that a declaration holds, except the members.
std::string Describe(const Declaration& declaration);

// Returns a text that says where the lists of tensors of two ranks differ first. It is empty if they are equal.
std::string FirstDifference(const std::string& first, const std::vector<std::string>& one, const std::string& second,
                            const std::vector<std::string>& other);

// Returns how messages to users call a bucket: by its name, and by the first tensor in it if tensors have names.
std::string TitleOf(const std::string& bucket, const std::vector<std::string>& members);

}  // namespace horovod_partial
