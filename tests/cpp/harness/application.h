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

// Micro-batches of all ranks, so many for each.
inline BucketConfig SharedConfig(int ranks, int each, bool grants) {
  BucketConfig config = Config(1, Missed::kReplay);
  config.spec.policy.rule = Policy::Rule::kWorkSharing;
  config.spec.policy.micro_batches = ranks * each;
  config.spec.policy.grants = grants;
  config.spec.policy.max_staleness = 1000;
  config.spec.policy.description = "WorkSharing()";
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

// Zeros at first. An engine knows it by its address, which on a device is none for a test.
class Tensor {
 public:
  explicit Tensor(Memory& memory) {
    buffer_.Reserve(kElements * sizeof(float), memory);
    buffer_.Zero();
  }
  void* data() { return buffer_.data(); }
  const void* data() const { return buffer_.data(); }
  void Set(const Floats& values) { std::copy(values.begin(), values.end(), View()); }
  Floats values() const { return {View(), View() + kElements}; }

 private:
  float* View() const { return static_cast<float*>(test::View(buffer_.memory(), buffer_.data(), buffer_.size())); }

  Buffer buffer_;
};

// Makes a contribution when it has been asked often enough, and says so.
class PolledEvent final : public ReadyEvent {
 public:
  PolledEvent(FakeHorovod& horovod, Tensor& target, Floats contribution, int polls)
      : horovod_(horovod), target_(target), contribution_(std::move(contribution)), polls_(polls) {}
  bool Ready() const override {
    if (polls_ > 0 && --polls_ == 0) {
      target_.Set(contribution_);
      horovod_.CountWakeUp();  // the arrival may end its wait at once
    }
    return polls_ == 0;
  }

 private:
  FakeHorovod& horovod_;
  Tensor& target_;
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
  struct Tensors {
    explicit Tensors(Memory& memory) : input(memory), output(memory), round(memory) {}

    std::shared_ptr<SharedBucket> handle;
    std::shared_ptr<Operation> operation;
    Tensor input;
    Tensor output;
    Tensor round;  // with kReplay: where the next round is taken to
    bool in_place = false;
    int steps = 0;
    std::vector<Floats> contributions;  // by step
    Floats submitted = Floats(kElements);
    std::vector<Got> got;
  };

  Application(FakeHorovod& horovod, Rank rank, const std::vector<BucketConfig>& configs)
      : horovod_(horovod), engine_(horovod.engine(rank)), rank_(rank), configs_(configs) {
    for (BucketConfig& config : configs_) {
      config.memory = &horovod.memory(rank);
      tensors_.emplace_back(*config.memory);
    }
  }

  // What a device has not made yet, when a shutdown has ended the wait for it, is made before its memory goes.
  ~Application() {
    if (auto* const device = OwnDevice()) device->Synchronize();
  }
  Application(const Application&) = delete;
  Application& operator=(const Application&) = delete;

  void Declare(int bucket) {
    if (At(bucket).handle == nullptr)
      At(bucket).handle = engine_.buckets().Declare(BucketName(bucket), configs_[Index(bucket)]);
  }
  // With `polls` a device makes the contribution, and is ready when it has been asked so often.
  void Arrive(int bucket, bool in_place = true, int polls = 0) {
    ArriveWith(bucket, Contribution(rank_, bucket, At(bucket).steps), in_place, polls);
  }
  void ArriveWith(int bucket, const Floats& contribution, bool in_place = true, int polls = 0, int work = 0) {
    Tensors& tensors = At(bucket);
    Declare(bucket);
    ++tensors.steps;
    tensors.contributions.push_back(contribution);
    AddTo(tensors.submitted, contribution);
    tensors.in_place = in_place;
    const Bucket::Arrival arrival{tensors.input.data(), Target(tensors).data(), 1, work};  // it stays where it is
    tensors.input.Set(polls > 0 ? Floats(kElements, -1.F) : contribution);
    tensors.operation =
        engine_.Arrive(tensors.handle, arrival, polls > 0 ? Make(tensors.input, contribution, polls) : nullptr);
  }
  bool IsDone(int bucket) { return engine_.Poll(*At(bucket).handle, *At(bucket).operation); }
  void Wait(int bucket) {
    Tensors& tensors = At(bucket);
    const std::shared_ptr<Operation> operation = std::exchange(tensors.operation, nullptr);
    engine_.Wait(*tensors.handle, *operation);
    Keep(bucket, operation->info, Target(tensors));
  }
  // As an optimizer of gradients does after a flush.
  void Collect() {
    for (int bucket = 0; bucket < buckets(); ++bucket) {
      Tensors& tensors = At(bucket);
      if (tensors.handle == nullptr || !HasGradients(bucket)) continue;
      if (configs_[Index(bucket)].spec.missed == Missed::kReplay) {
        Keep(bucket, {}, tensors.output);
      } else if (const auto operation = engine_.Collect(tensors.handle, tensors.output.data())) {
        Keep(bucket, operation->info, tensors.output);
      }
    }
  }

  int buckets() const { return static_cast<int>(tensors_.size()); }
  Rank rank() const { return rank_; }
  Tensors& At(int bucket) { return tensors_[Index(bucket)]; }
  bool HasGradients(int bucket) const { return configs_[Index(bucket)].spec.late == Late::kAccumulate; }
  Floats Total(int bucket) {
    Floats total(kElements);
    for (const Got& got : At(bucket).got)
      for (const Floats& result : got.results) AddTo(total, result);
    return total;
  }

  std::string error;  // what its thread ended with, if not well

 private:
  FakeDevice* OwnDevice() const { return dynamic_cast<FakeDevice*>(&horovod_.memory(rank_)); }
  // A device makes the contribution: in its own time, if it has a stream.
  std::shared_ptr<ReadyEvent> Make(Tensor& target, const Floats& contribution, int polls) {
    auto* const device = OwnDevice();
    if (device == nullptr || !device->has_stream())
      return std::make_shared<PolledEvent>(horovod_, target, contribution, polls);
    return device->Record([&target, contribution] { target.Set(contribution); });
  }
  static Tensor& Target(Tensors& tensors) { return tensors.in_place ? tensors.input : tensors.output; }

  // With kReplay each bucket is a family of its own.
  void Keep(int bucket, const RoundInfo& info, const Tensor& result) {
    Tensors& tensors = At(bucket);
    Got got{info, {}};
    if (configs_[Index(bucket)].spec.missed == Missed::kReplay) {
      while (const auto taken = engine_.families().TakeRound({BucketName(bucket)}, {tensors.round.data()}))
        if (*taken > 0) got.results.push_back(tensors.round.values());
    } else {
      got.results.push_back(result.values());
    }
    tensors.got.push_back(std::move(got));
  }

  FakeHorovod& horovod_;
  Engine& engine_;
  const Rank rank_;
  std::vector<Tensors> tensors_;
  std::vector<BucketConfig> configs_;
};

}  // namespace horovod_partial::test
