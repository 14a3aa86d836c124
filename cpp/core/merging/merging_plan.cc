#include "core/merging/merging_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace horovod_partial {
namespace {

// Divides gradients into messages so that the last message ends as early as possible, and so that there are as few
// messages as this end allows. (Each message also keeps processors busy. The cost model ignores this cost.)
//
// The earliest end of the first j gradients is a minimum over all choices of the first gradient in their last message.
// A message starts when the messages before it have ended and its last gradient is ready. It lasts for its cost. When
// the earliest ends are known, the messages are chosen, the last message first. Each message takes as many gradients as
// it can, so long as the gradients before it can still end in time. (Taking fewer gradients would not help: moving a
// gradient to a later message saves the earlier message more time than it costs the later one.)
MergingPlan Exact(const std::vector<Gradient>& gradients, const LinearCost& cost) {
  const std::size_t count = gradients.size();
  std::vector<double> earliest(count + 1, std::numeric_limits<double>::infinity());
  earliest[0] = -std::numeric_limits<double>::infinity();
  for (std::size_t j = 1; j <= count; ++j) {
    const double ready = gradients[j - 1].ready;
    double bytes = 0;
    for (std::size_t first = j; first-- > 0;) {
      bytes += gradients[first].bytes;
      earliest[j] = std::min(earliest[j], std::max(earliest[first], ready) + cost(bytes));
    }
  }
  MergingPlan plan;
  constexpr double kRounding = 1e-14;
  double deadline = earliest[count] + kRounding * std::max(1.0, std::abs(earliest[count]));
  for (std::size_t end = count; end > 0;) {
    std::size_t begin = end - 1;
    double bytes = 0;
    double start = deadline;
    for (std::size_t first = end; first-- > 0;) {
      bytes += gradients[first].bytes;
      const double latest = deadline - cost(bytes);
      if (latest < gradients[end - 1].ready) break;
      if (latest < earliest[first]) continue;
      begin = first;
      start = latest;
    }
    plan.push_back(static_cast<int>(end - begin));
    deadline = start;
    end = begin;
  }
  std::reverse(plan.begin(), plan.end());
  return plan;
}

// Plans messages by Algorithm 1 of the MG-WFBP paper. Only start times that a merge changes are recomputed.
MergingPlan Paper(const std::vector<Gradient>& gradients, const LinearCost& cost) {
  MergingPlan plan{0};
  double free = -std::numeric_limits<double>::infinity();  // when the previous message has ended
  double bytes = 0;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    ++plan.back();
    bytes += gradients[i].bytes;
    if (i + 1 == gradients.size()) break;
    const double start = std::max(free, gradients[i].ready);
    if (gradients[i + 1].ready - start < cost.latency) continue;
    free = start + cost(bytes);
    bytes = 0;
    plan.push_back(0);
  }
  return plan;
}

MergingPlan Threshold(const std::vector<Gradient>& gradients, const LinearCost& cost, double threshold_bytes) {
  MergingPlan plan;
  double free = -std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < gradients.size();) {
    const double start = std::max(free, gradients[i].ready);
    double bytes = 0;
    int count = 0;
    do {
      bytes += gradients[i].bytes;
      ++count;
      ++i;
    } while (i < gradients.size() && gradients[i].ready <= start && bytes + gradients[i].bytes <= threshold_bytes);
    plan.push_back(count);
    free = start + cost(bytes);
  }
  return plan;
}

}  // namespace

MergingPlan PlanMerging(MergingRule rule, const std::vector<Gradient>& gradients, const LinearCost& cost,
                        double threshold_bytes) {
  if (gradients.empty()) return {};
  switch (rule) {
    case MergingRule::kExact: return Exact(gradients, cost);
    case MergingRule::kPaper: return Paper(gradients, cost);
    case MergingRule::kWaitFree: return MergingPlan(gradients.size(), 1);
    case MergingRule::kSingle: return {static_cast<int>(gradients.size())};
    case MergingRule::kThreshold: return Threshold(gradients, cost, threshold_bytes);
  }
  throw std::logic_error("unknown merge rule");
}

std::vector<Message> Messages(const MergingPlan& plan, const std::vector<Gradient>& gradients, const LinearCost& cost) {
  std::vector<Message> messages;
  double free = -std::numeric_limits<double>::infinity();
  std::size_t next = 0;
  for (const int count : plan) {
    if (count < 1 || next + static_cast<std::size_t>(count) > gradients.size())
      throw std::invalid_argument("the plan does not fit the gradients");
    Message message;
    const std::size_t end = next + static_cast<std::size_t>(count);
    for (std::size_t i = end; i-- > next;) message.bytes += gradients[i].bytes;
    message.start = std::max(free, gradients[end - 1].ready);
    message.end = free = message.start + cost(message.bytes);
    messages.push_back(message);
    next = end;
  }
  if (next != gradients.size()) throw std::invalid_argument("the plan does not fit the gradients");
  return messages;
}

}  // namespace horovod_partial
