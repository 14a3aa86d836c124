// One rank's application: the memory of its buckets, what it has submitted, and what it has got.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "harness/fake_horovod.h"

namespace horovod_partial::test {

using Floats = std::vector<float>;

inline constexpr std::size_t kElements = 5;

inline std::string BucketName(int bucket) { return "bucket." + std::to_string(bucket); }

inline BucketConfig Config(int quorum, Missed missed = Missed::kSum) {
  BucketConfig config;
  config.spec.missed = missed;
  config.spec.policy.quorum = quorum;
  config.spec.policy.grace = Time(0);
  config.spec.policy.description = "Quorum(" + std::to_string(quorum) + ")";
  config.shape = {static_cast<std::int64_t>(kElements)};
  return config;
}

// Models, of which the last one of a rank stands in for it. Groups by a schedule.
inline BucketConfig ModelConfig(Schedule schedule, Round period = 0) {
  BucketConfig config = Config(1, Missed::kLatest);
  config.spec.late = Late::kKeep;
  config.spec.divisor = Divisor::kContributors;
  config.spec.policy.schedule = std::move(schedule);
  config.spec.policy.period = period;
  config.spec.policy.description = "GroupAverage()";
  return config;
}

// Models of the first ranks that are ready.
inline BucketConfig ReadyConfig(int group_size, int window = 8, Weights weights = Weights::kUniform) {
  BucketConfig config = Config(1, Missed::kLatest);
  config.spec.late = Late::kDiscard;
  config.spec.divisor = Divisor::kContributors;
  config.spec.weights = weights;
  config.spec.weight_parameter = 0.9;
  config.spec.policy.rule = Policy::Rule::kReady;
  config.spec.policy.group_size = group_size;
  config.spec.policy.window = window;
  config.spec.policy.description = "PartialReduce(" + std::to_string(group_size) + ")";
  return config;
}

inline void AddTo(Floats& sum, const Floats& values) {
  for (std::size_t i = 0; i < kElements; ++i) sum[i] += values[i];
}

// Sums of its contributions are integers that floats hold exactly, and tell ranks, buckets, steps and elements apart.
inline Floats Contribution(Rank rank, int bucket, int step) {
  Floats values(kElements);
  for (std::size_t i = 0; i < kElements; ++i)
    values[i] = static_cast<float>(static_cast<int>(i) + 10 * rank + 100 * bucket + 1000 * step + 1);
  return values;
}

// A make-believe device: makes a contribution when it has been asked often enough, and says so.
class FakeDevice final : public ReadyEvent {
 public:
  FakeDevice(FakeHorovod& horovod, Floats& target, Floats contribution, int polls)
      : horovod_(horovod), target_(target), contribution_(std::move(contribution)), polls_(polls) {}
  bool Ready() const override {
    if (polls_ > 0 && --polls_ == 0) {
      std::copy(contribution_.begin(), contribution_.end(), target_.begin());
      horovod_.CountWakeUp();  // the arrival may end its wait at once
    }
    return polls_ == 0;
  }

 private:
  FakeHorovod& horovod_;
  Floats& target_;
  const Floats contribution_;
  mutable int polls_;
};

class Application {
 public:
  // What the application has got of a bucket, in one piece.
  struct Got {
    RoundInfo info;
    std::vector<Floats> results;  // the newest is the last
  };
  struct Memory {
    std::shared_ptr<SharedBucket> handle;
    std::shared_ptr<Operation> operation;
    Floats input = Floats(kElements);
    Floats output = Floats(kElements);
    bool in_place = false;
    int steps = 0;
    std::vector<Floats> contributions;  // by step
    Floats submitted = Floats(kElements);
    std::vector<Got> got;
  };

  Application(FakeHorovod& horovod, Rank rank, const std::vector<BucketConfig>& configs)
      : horovod_(horovod), engine_(horovod.engine(rank)), rank_(rank), memory_(configs.size()), configs_(configs) {}

  // With `polls` a device makes the contribution, and is ready when it has been asked so often.
  void Arrive(int bucket, bool in_place = true, int polls = 0) {
    ArriveWith(bucket, Contribution(rank_, bucket, At(bucket).steps), in_place, polls);
  }
  void ArriveWith(int bucket, const Floats& contribution, bool in_place = true, int polls = 0, int work = 0) {
    Memory& memory = At(bucket);
    if (memory.handle == nullptr) memory.handle = engine_.Declare(BucketName(bucket), configs_[Index(bucket)]);
    ++memory.steps;
    memory.contributions.push_back(contribution);
    AddTo(memory.submitted, contribution);
    memory.in_place = in_place;
    const Bucket::Arrival arrival{memory.input.data(), Target(memory).data(), 1, work};  // it stays where it is
    if (polls > 0) {
      std::fill(memory.input.begin(), memory.input.end(), -1.F);
      memory.operation = engine_.Arrive(memory.handle, arrival,
                                        std::make_shared<FakeDevice>(horovod_, memory.input, contribution, polls));
    } else {
      std::copy(contribution.begin(), contribution.end(), memory.input.begin());
      memory.operation = engine_.Arrive(memory.handle, arrival);
    }
  }
  bool IsDone(int bucket) { return engine_.Poll(*At(bucket).handle, *At(bucket).operation); }
  void Wait(int bucket) {
    Memory& memory = At(bucket);
    const std::shared_ptr<Operation> operation = std::exchange(memory.operation, nullptr);
    engine_.Wait(*memory.handle, *operation);
    Keep(bucket, operation->info, Target(memory));
  }
  // As an optimizer of gradients does after a flush.
  void Collect() {
    for (int bucket = 0; bucket < buckets(); ++bucket) {
      Memory& memory = At(bucket);
      if (memory.handle == nullptr || memory.handle->config.spec.late != Late::kAccumulate) continue;
      if (memory.handle->config.spec.missed == Missed::kReplay) {
        Keep(bucket, {}, memory.output);
      } else if (const auto operation = engine_.Collect(memory.handle, memory.output.data())) {
        Keep(bucket, operation->info, memory.output);
      }
    }
  }

  int buckets() const { return static_cast<int>(memory_.size()); }
  Rank rank() const { return rank_; }
  Memory& At(int bucket) { return memory_[Index(bucket)]; }
  Floats Total(int bucket) {
    Floats total(kElements);
    for (const Got& got : At(bucket).got)
      for (const Floats& result : got.results) AddTo(total, result);
    return total;
  }

  std::string error;  // what its thread ended with, if not well

 private:
  static std::size_t Index(int i) { return static_cast<std::size_t>(i); }
  static Floats& Target(Memory& memory) { return memory.in_place ? memory.input : memory.output; }

  // With kReplay each bucket is a family of its own.
  void Keep(int bucket, const RoundInfo& info, const Floats& result) {
    Memory& memory = At(bucket);
    Got got{info, {}};
    if (memory.handle->config.spec.missed == Missed::kReplay) {
      Floats next(kElements);
      while (const auto taken = engine_.TakeRound({{BucketName(bucket), next.data()}}))
        if (taken->gradients > 0) got.results.push_back(next);
    } else {
      got.results.push_back(result);
    }
    memory.got.push_back(std::move(got));
  }

  FakeHorovod& horovod_;
  Engine& engine_;
  const Rank rank_;
  std::vector<Memory> memory_;
  const std::vector<BucketConfig> configs_;
};

}  // namespace horovod_partial::test
