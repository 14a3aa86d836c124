// What a rank says of a bucket until it has seen a round of it, and what all ranks must agree on.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/dtype.h"
#include "core/fields.h"
#include "core/memory.h"
#include "core/policy.h"
#include "core/types.h"

namespace horovod_partial {

struct Declaration {
  Policy policy;
  DataType type = DataType::kFloat32;
  std::vector<std::int64_t> shape = {};
  int device =
      Memory::kHost;  // where the rank's tensor lies: ranks may name different devices, but not host and device
  double prescale_factor = 1;
  double postscale_factor = 1;
  std::vector<std::string> members = {};  // as in BucketSpec

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("policy", self.policy), Named("type", self.type), Named("shape", self.shape),
                           Named("device", self.device), Named("prescale_factor", self.prescale_factor),
                           Named("postscale_factor", self.postscale_factor), Named("members", self.members));
  }
  bool operator==(const Declaration& other) const { return Fields(*this) == Fields(other); }
};

// Why two declarations do not go together, in Horovod's words where it has some; empty if they do. `first` and `second`
// say whose they are, as "rank 0".
std::string Disagreement(const std::string& first, const Declaration& one, const std::string& second,
                         const Declaration& other);

// Where two lists of members part first; empty if nowhere.
std::string FirstDifference(const std::string& first, const std::vector<std::string>& one, const std::string& second,
                            const std::vector<std::string>& other);

// A bucket as a user knows it: by what lies in it, if that has names.
std::string TitleOf(const std::string& bucket, const std::vector<std::string>& members);

}  // namespace horovod_partial
