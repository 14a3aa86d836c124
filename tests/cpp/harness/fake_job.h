// A whole job in this process: a make-believe Horovod, and an application for each rank. A test drives the background
// by cycles, in its own thread, or gives each rank a background thread (FakeHorovod::Start).
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "harness/application.h"
#include "harness/fake_device.h"
#include "harness/fake_horovod.h"

namespace horovod_partial::test {

class FakeJob {
 public:
  // Every rank has the same buckets. With `devices` the tensors of a rank lie on its device.
  void Start(FakeHorovod::Settings settings, const std::vector<BucketConfig>& configs,
             std::shared_ptr<FakeDevices> devices = nullptr) {
    if (devices != nullptr) settings.memory = [devices](Rank rank) -> Memory& { return (*devices)[rank]; };
    devices_ = std::move(devices);
    horovod_ = std::make_unique<FakeHorovod>(std::move(settings));
    for (Rank rank = 0; rank < horovod_->size(); ++rank)
      applications_.push_back(std::make_unique<Application>(*horovod_, rank, configs));
  }
  // Shuts Horovod down in another cycle.
  void Shutdown() {
    horovod_->Shutdown();
    Cycle();
  }

  FakeHorovod& horovod() const { return *horovod_; }
  Application& At(Rank rank) { return *applications_.at(static_cast<std::size_t>(rank)); }
  Engine& EngineOf(Rank rank) { return horovod_->engine(rank); }
  const std::vector<std::unique_ptr<Application>>& applications() const { return applications_; }
  const PastRound& LastRound() const { return horovod_->history().back(); }
  std::size_t Rounds() const { return horovod_->history().size(); }

  // --- What the thread does that drives the background by cycles

  void Cycle(const std::function<void()>& between = [] {}) { horovod_->Cycle(random_, between); }
  // Until the arrival has its result.
  void Wait(Rank rank, int bucket = 0) {
    while (horovod_->IsAlive(rank) && !At(rank).IsDone(bucket)) Cycle();
    At(rank).Wait(bucket);
  }
  // Round 0 of every bucket.
  void RunRoundZero() {
    for (auto& application : applications_)
      for (int bucket = 0; bucket < application->buckets(); ++bucket) application->Arrive(bucket);
    for (auto& application : applications_)
      for (int bucket = 0; bucket < application->buckets(); ++bucket) Wait(application->rank(), bucket);
  }
  // Begins something in a thread of its own.
  static std::future<void> Begin(std::function<void()> body) { return std::async(std::launch::async, std::move(body)); }
  // Until all of them have ended; rethrows what one has thrown.
  void CycleUntilDone(std::vector<std::future<void>> threads) {
    for (auto& thread : threads)
      while (thread.wait_for(std::chrono::seconds(0)) != std::future_status::ready) Cycle();
    for (auto& thread : threads) thread.get();
  }
  void CycleUntilDone(std::future<void> thread) {
    std::vector<std::future<void>> threads;
    threads.push_back(std::move(thread));
    CycleUntilDone(std::move(threads));
  }
  // The same on every rank, each in a thread of its own.
  void OnAllRanks(const std::function<void(Rank)>& body) {
    std::vector<std::future<void>> threads;
    for (Rank rank = 0; rank < horovod_->size(); ++rank) threads.push_back(Begin([&body, rank] { body(rank); }));
    CycleUntilDone(std::move(threads));
  }

 private:
  std::shared_ptr<FakeDevices> devices_;
  std::unique_ptr<FakeHorovod> horovod_;
  std::vector<std::unique_ptr<Application>> applications_;  // by rank
  Random random_{1};
};

}  // namespace horovod_partial::test
