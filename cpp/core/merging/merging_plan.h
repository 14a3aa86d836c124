// Which gradients travel in one message (MG-WFBP, INFOCOM'19 and IEEE TPDS 2021).
#pragma once

#include <string>
#include <vector>

namespace horovod_partial {

// What one message costs: latency + seconds_per_byte * bytes; the paper's a and b.
struct LinearCost {
  double latency = 0;
  double seconds_per_byte = 0;

  double operator()(double bytes) const { return latency + seconds_per_byte * bytes; }
};

// A plan gets gradients in the order in which the backward pass makes them.
struct Gradient {
  double ready = 0;  // seconds since any fixed moment; not less than in the gradient before
  double bytes = 0;
};

enum class MergingRule {
  kExact,      // the plan that ends first; of several, one with the fewest messages
  kPaper,      // the paper's Algorithm 1: wait for the next gradient if that takes less time than a latency
  kWaitFree,   // one message for each gradient
  kSingle,     // one message
  kThreshold,  // as Horovod's tensor fusion: all that is ready when the network is free, up to a number of bytes
};
MergingRule MergingRuleFromName(const std::string& name);

// How many gradients each message has, in order.
using MergingPlan = std::vector<int>;

// Messages are sent one after the other, each when its last gradient is ready.
//
// The paper calls its rule optimal. Under its own model it is not, because each decision minimises only the end of the
// next message. kExact needs O(n^2) time too: the earliest end of all gradients up to one follows from the earliest
// ends before it.
MergingPlan PlanMerging(MergingRule rule, const std::vector<Gradient>& gradients, const LinearCost& cost,
                        double threshold_bytes);

struct Message {
  double start = 0;  // seconds since the same moment as Gradient::ready
  double end = 0;
  double bytes = 0;
};
std::vector<Message> Messages(const MergingPlan& plan, const std::vector<Gradient>& gradients, const LinearCost& cost);

}  // namespace horovod_partial
