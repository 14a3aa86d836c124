// What a negotiating cycle costs rank 0, by the number of ranks. It decodes a report of each rank, decides, and encodes
// the closings. Horovod's own work in the cycle, such as gathering the reports, is not in these times.
//
// Counters: `report_bytes` travel from each rank to rank 0 in a cycle, `closing_bytes` from rank 0 to each rank.
// Horovod's own bit vectors take one bit a tensor in each direction.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/rounds/coordinator.h"
#include "core/values/bytes.h"

namespace horovod_partial {
namespace {

using namespace std::chrono_literals;

const std::vector<std::int64_t> kRanks = {8, 32, 128, 512, 2048};
constexpr int kBuckets = 4;  // ResNet-50's gradients in buckets of 25 MB

std::string BucketAt(int index) { return "DistributedOptimizer.0.bucket." + std::to_string(index); }

Report ReportOf(Report::Item::Kind kind, const Policy* first) {
  Report report;
  for (int index = 0; index < kBuckets; ++index) {
    Report::Item& item = report.items.emplace_back();
    item.kind = kind;
    item.bucket = BucketAt(index);
    item.gradients = 1;
    if (first == nullptr) continue;
    item.declaration.emplace();
    item.declaration->policy = *first;
    item.declaration->shape = {6'400'000};
  }
  return report;
}

// Runs cycles in which the ranks of each half say the same, in turns: `one` and `other` are the encoded reports of a
// cycle's two halves, and change places after each cycle. An empty string stands for no report.
void RunCycles(benchmark::State& state, int quorum, const std::string& one, const std::string& other, int rounds) {
  const int ranks = static_cast<int>(state.range(0));
  Policy policy;
  policy.quorum = quorum;
  policy.grace = 0ms;
  policy.description = "a policy";
  Coordinator coordinator(ranks);
  Time now{0};
  std::size_t closing_bytes = 0;
  const auto cycle = [&](const std::string& even, const std::string& odd) {
    now += 1ms;
    for (Rank rank = 0; rank < ranks; ++rank) {
      const std::string& bytes = rank % 2 == 0 ? even : odd;
      coordinator.Observe(rank, bytes.empty() ? Report() : FromBytes<Report>(bytes, "a report"), now);
    }
    std::vector<std::int32_t> words;
    const std::vector<Closing> closings = coordinator.Decide(now);
    for (const Closing& closing : closings) Append(closing, words);
    closing_bytes = words.size() * sizeof(std::int32_t);
    return static_cast<int>(closings.size());
  };
  const std::string declared = BytesOf(ReportOf(Report::Item::Kind::kArrival, &policy));
  if (cycle(declared, declared) != kBuckets) throw std::runtime_error("round 0 must close with all ranks");
  bool swapped = false;
  for (auto _ : state) {
    if (cycle(swapped ? other : one, swapped ? one : other) != rounds) throw std::runtime_error("rounds are missing");
    swapped = !swapped;
  }
  state.counters["report_bytes"] = static_cast<double>(std::max(one.size(), other.size()));
  state.counters["closing_bytes"] = static_cast<double>(closing_bytes);
}

void NoNews(benchmark::State& state) { RunCycles(state, 1, "", "", 0); }

void EveryRankArrives(benchmark::State& state) {
  const std::string arrives = BytesOf(ReportOf(Report::Item::Kind::kArrival, nullptr));
  RunCycles(state, static_cast<int>(state.range(0)), arrives, arrives, kBuckets);
}

void HalfOfTheRanksArriveLate(benchmark::State& state) {
  const std::string arrives = BytesOf(ReportOf(Report::Item::Kind::kArrival, nullptr));
  const std::string pending = BytesOf(ReportOf(Report::Item::Kind::kPending, nullptr));
  RunCycles(state, static_cast<int>(state.range(0)) / 2, arrives, pending, kBuckets);
}

BENCHMARK(NoNews)->ArgsProduct({kRanks})->Unit(benchmark::kMicrosecond);
BENCHMARK(EveryRankArrives)->ArgsProduct({kRanks})->Unit(benchmark::kMicrosecond);
BENCHMARK(HalfOfTheRanksArriveLate)->ArgsProduct({kRanks})->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace horovod_partial
