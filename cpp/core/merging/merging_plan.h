// Plans which gradients travel in one message (MG-WFBP, INFOCOM'19 and IEEE TPDS 2021). Lays tensors out in a bucket.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace horovod_partial {

// The seconds that one message takes: latency + seconds_per_byte * bytes. MG-WFBP calls the two constants a and b.
struct LinearCost {
  double latency = 0;
  double seconds_per_byte = 0;

  double operator()(double bytes) const { return latency + seconds_per_byte * bytes; }
};

// A gradient of the backward pass. A list of gradients has the order in which the backward pass makes them.
struct Gradient {
  double ready = 0;  // when the gradient is made, in seconds since any fixed moment; gradients are sorted by this time
  double bytes = 0;
};

enum class MergingRule {
  kExact,     // the plan whose last message ends first; of several such plans, one with the fewest messages
  kPaper,     // Algorithm 1 of MG-WFBP: wait for the next gradient if it comes within one latency
  kWaitFree,  // each gradient travels in a message of its own
  kSingle,    // all gradients travel in one message
  // What Horovod's tensor fusion does: a message takes all gradients that are ready, up to a number of bytes.
  kThreshold,
};
constexpr auto NamesOf(MergingRule /*type*/) {
  return std::array{"exact", "paper", "wait_free", "single", "threshold"};
}

// The number of gradients in each message, in the order of the messages.
using MergingPlan = std::vector<int>;

// Plans the messages of a step. Messages are sent one after the other, each when its last gradient is ready.
//
// MG-WFBP calls its rule (kPaper) optimal. By its cost model kPaper is not: each decision minimises only the end of the
// next message. kExact is optimal, and needs O(n^2) time for n gradients, as the paper's algorithm does.
MergingPlan PlanMerging(MergingRule rule, const std::vector<Gradient>& gradients, const LinearCost& cost,
                        double threshold_bytes);

struct Message {
  double start = 0;  // when the message starts, in seconds since the moment from which Gradient::ready counts
  double end = 0;
  double bytes = 0;
};
std::vector<Message> Messages(const MergingPlan& plan, const std::vector<Gradient>& gradients, const LinearCost& cost);

// Returns the offset of each tensor in the bucket, in elements, followed by the size of the bucket. Tensors are
// aligned, because results are views of the bucket and TensorFlow wants aligned tensors. A single tensor is sent from
// where it lies, so it gets no padding.
inline std::vector<std::int64_t> PackedOffsets(const std::vector<std::int64_t>& elements, std::int64_t element_bytes) {
  constexpr std::int64_t kAlignment = 64;
  const std::int64_t unit = elements.size() == 1 ? 1 : kAlignment / element_bytes;
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t count : elements) offsets.push_back(offsets.back() + (count + unit - 1) / unit * unit);
  return offsets;
}

}  // namespace horovod_partial
