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

// In the order in which backward makes them.
struct Gradient {
  double ready = 0;  // seconds since some moment; never less than that of the gradient before
  double bytes = 0;
};

enum class FusionRule {
  kExact,      // the plan that ends first, with as few messages as that takes
  kPaper,      // the paper's Algorithm 1: wait for the next gradient if that takes less than a latency
  kWaitFree,   // a message for each gradient
  kSingle,     // one message
  kThreshold,  // what is ready when the line is free, up to a number of bytes, as Horovod's tensor fusion takes it
};
FusionRule FusionRuleFromName(const std::string& name);

// How many gradients each message has, in order.
using FusionPlan = std::vector<int>;

// Messages go one after the other, each when its last gradient is ready.
//
// The paper calls its rule optimal. It is not, under its own model: each decision minimises the end of the next message
// only. kExact takes O(n^2) as well: the earliest end of everything up to a gradient follows from the earliest ends
// before it.
FusionPlan PlanFusion(FusionRule rule, const std::vector<Gradient>& gradients, const LinearCost& cost,
                      double threshold_bytes);

struct Message {
  double start = 0;  // seconds, since the same moment
  double end = 0;
  double bytes = 0;
};
std::vector<Message> Messages(const FusionPlan& plan, const std::vector<Gradient>& gradients, const LinearCost& cost);

}  // namespace horovod_partial
