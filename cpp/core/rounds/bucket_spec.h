// The specification of a bucket: its policy, and how contributions and results are treated.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/groups/weights.h"
#include "core/quorum/policy.h"
#include "core/rounds/missed.h"
#include "core/values/fields.h"

namespace horovod_partial {

enum class Divisor : std::uint8_t {
  kNone,          // the result is the sum, after Horovod's scaling if there is any
  kContributors,  // the result is divided by the number of gradients in the sum, including pending gradients
};
constexpr auto NamesOf(Divisor /*type*/) { return std::array{"none", "contributors"}; }

// What happens to a late contribution.
enum class Late : std::uint8_t {
  kAccumulate,  // a gradient is added to the pending sum, and delivered once
  kKeep,        // a model replaces the rank's kept model, and is used in every round until a newer model comes
  kDiscard,     // a model is not delivered, because a newer model will come
};
constexpr auto NamesOf(Late /*type*/) { return std::array{"accumulate", "keep", "discard"}; }

// How a bucket treats contributions and results.
struct Handling {
  Missed missed = Missed::kSum;
  Late late = Late::kAccumulate;
  Divisor divisor = Divisor::kNone;
  // How much the contribution of an arrival counts. Unless the weights are uniform, the result is a weighted average.
  Weights weights = Weights::kUniform;
  double weight_parameter = 1;  // the parameter of the weights: `contraction` or `alpha` in weights.h
  int replay_limit = 8;         // kReplay: the number of untaken results at which rounds wait for this rank
  bool drop_nonfinite = false;  // true if a late contribution that is not finite is dropped, and counted

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("missed", self.missed), Named("late", self.late), Named("divisor", self.divisor),
                           Named("weights", self.weights), Named("weight_parameter", self.weight_parameter),
                           Named("replay_limit", self.replay_limit), Named("drop_nonfinite", self.drop_nonfinite));
  }
};

// All that an optimizer or operation says of its bucket, except the tensor, in a form that all frameworks share.
struct BucketSpec : Handling {
  Policy policy;
  double prescale_factor = 1;
  double postscale_factor = 1;
  std::vector<std::string> members;  // the name and the shape of each tensor in the bucket; errors show them

  template <class Self>
  static auto Fields(Self& self) {
    return std::tuple_cat(
        Handling::Fields(self),
        std::make_tuple(Named("policy", self.policy), Named("prescale_factor", self.prescale_factor),
                        Named("postscale_factor", self.postscale_factor), Named("members", self.members)));
  }
};

// Encodes the specification of a bucket as bytes, because TensorFlow graphs store it. Decoding throws
// std::runtime_error if the bytes are damaged, or come from a version with other fields.
std::string Encode(const BucketSpec& spec);
BucketSpec DecodeBucketSpec(const std::string& bytes);

}  // namespace horovod_partial
