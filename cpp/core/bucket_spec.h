// What a bucket is declared with.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/fields.h"
#include "core/missed.h"
#include "core/policy.h"
#include "core/weights.h"

namespace horovod_partial {

enum class Divisor : std::uint8_t {
  kNone,          // the sum, or whatever Horovod's scaling makes of it
  kContributors,  // the number of gradients in the sum, pending ones included
};
constexpr auto NamesOf(Divisor /*type*/) { return std::array{"none", "contributors"}; }

// What becomes of a contribution that comes too late for its round.
enum class Late : std::uint8_t {
  kAccumulate,  // it joins what is pending, and is delivered once: gradients
  kKeep,        // it replaces the one before, and stands in for its rank in every round until a newer one comes: models
  kDiscard,     // it is not delivered: models, where a newer one comes anyway
};
constexpr auto NamesOf(Late /*type*/) { return std::array{"accumulate", "keep", "discard"}; }

// What becomes of a bucket's contributions and results.
struct Handling {
  Missed missed = Missed::kSum;
  Late late = Late::kAccumulate;
  Divisor divisor = Divisor::kNone;
  Weights weights = Weights::kUniform;  // of the fresh contributions; the sum is their weighted average then
  double weight_parameter = 1;          // contraction or alpha (weights.h)
  int replay_limit = 8;                 // kReplay: so many untaken results, and rounds wait for this rank
  bool drop_nonfinite = false;          // a late contribution that is not finite is dropped and counted

  template <class Self>
  static auto Fields(Self& self) {
    return std::make_tuple(Named("missed", self.missed), Named("late", self.late), Named("divisor", self.divisor),
                           Named("weights", self.weights), Named("weight_parameter", self.weight_parameter),
                           Named("replay_limit", self.replay_limit), Named("drop_nonfinite", self.drop_nonfinite));
  }
};

// All that a front end says of a bucket, but for its tensor: the same in every framework, which need not look into it.
struct BucketSpec : Handling {
  Policy policy;
  double prescale_factor = 1;
  double postscale_factor = 1;
  std::vector<std::string> members;  // what lies in the tensor, each with its shape, in the user's words

  template <class Self>
  static auto Fields(Self& self) {
    return std::tuple_cat(
        Handling::Fields(self),
        std::make_tuple(Named("policy", self.policy), Named("prescale_factor", self.prescale_factor),
                        Named("postscale_factor", self.postscale_factor), Named("members", self.members)));
  }
  bool operator==(const BucketSpec& other) const { return Fields(*this) == Fields(other); }
};

// As bytes, in which graphs keep it. Decoding throws std::runtime_error for bytes that are damaged, or of a version
// with other fields.
std::string Encode(const BucketSpec& spec);
BucketSpec DecodeBucketSpec(const std::string& bytes);

}  // namespace horovod_partial
