// Kernels of merged gradients (merging=hvd.MergedGradients): each kernel puts a gradient into its message of the
// present plan. No thread waits in them.
#include <tensorflow/core/framework/cancellation.h>
#include <tensorflow/core/framework/op_kernel.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attach/merging.h"
#include "tf/async_kernel.h"
#include "tf/destination.h"
#include "tf/device.h"
#include "tf/packed_tensors.h"

namespace horovod_partial::tf {
namespace {

using tensorflow::CancellationManager;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

double Seconds() { return std::chrono::duration<double>(Now()).count(); }

// A running kernel with its gradient.
struct Member {
  OpKernelContext* context;  // the kernel's context; valid until `done` is called
  tensorflow::AsyncOpKernel::DoneCallback done;
  tensorflow::CancellationToken token;
  bool given_up = false;  // true if TensorFlow has given the step up; guarded by the lock of Fillings

  void Finish(const absl::Status& status) const {
    context->cancellation_manager()->TryDeregisterCallback(token);  // after this, a cancellation does nothing
    if (!status.ok()) context->SetStatus(status);
    done();
  }
};

// A message that does not have all its gradients yet.
struct Filling {
  Filling(std::shared_ptr<const attach::Stream> stream, tensorflow::DataType type,
          const std::vector<std::int64_t>& elements)
      : message(std::make_shared<PackedTensors>(std::move(stream), type, elements)),
        members(elements.size()),
        missing(elements.size()) {}

  const std::shared_ptr<PackedTensors> message;
  std::vector<std::shared_ptr<Member>> members;  // in the order of the message; null for a missing gradient
  std::size_t missing;                           // the number of gradients that are not in the message yet
};

// The messages that are being filled, by bucket. TensorFlow's threads use them. While the lock is held, no other lock
// is taken, no end of a kernel is reported to TensorFlow, and no gradient is copied.
class Fillings {
 public:
  static Fillings& Instance() {
    static auto* fillings = new Fillings;
    return *fillings;
  }

  // Adds a kernel to its message; the first kernel makes the message. As soon as a kernel has joined, another thread
  // may end it. So `filling` and `gradient` give the caller what it still needs.
  absl::Status Join(const MergingSteps::Place& place, const std::shared_ptr<Member>& member,
                    const std::shared_ptr<const attach::Stream>& stream, std::shared_ptr<Filling>* filling,
                    Tensor* gradient) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (member->given_up) return GivenUp(place.bucket);
    auto& slot = fillings_[place.bucket];
    if (slot == nullptr) {
      auto made = std::make_shared<Filling>(stream, member->context->input_dtype(1), place.elements);
      const absl::Status status = made->message->Allocate(member->context, 1);
      if (!status.ok()) {
        fillings_.erase(place.bucket);
        return status;
      }
      slot = std::move(made);
    }
    if (slot->message->stream().device() != stream->device())
      return absl::InvalidArgumentError("the gradients of " + place.bucket +
                                        " lie on several devices: compute them under one tf.device");
    auto& seat = slot->members[place.position];
    if (seat != nullptr)
      return absl::InvalidArgumentError("a gradient of " + place.bucket +
                                        " has come twice: do not run two steps of one model at the same time");
    seat = member;
    *filling = slot;
    *gradient = member->context->input(1);
    return absl::OkStatus();
  }

  // Records that a gradient is in the message now. Returns true for the last one: then the caller sends the message.
  bool Complete(const std::string& bucket, const std::shared_ptr<Filling>& filling) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = fillings_.find(bucket);
    if (it == fillings_.end() || it->second != filling || --filling->missing > 0) return false;
    fillings_.erase(it);
    return true;
  }

  // Called when TensorFlow gives up the step of a kernel. If its message is still being filled, all kernels of the
  // message end with `status`, and the next step begins with an empty message. A message that has arrived is not
  // touched.
  void Abandon(const MergingSteps::Place& place, Member& member, const absl::Status& status) {
    std::shared_ptr<Filling> filling;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      member.given_up = true;
      const auto it = fillings_.find(place.bucket);
      if (it == fillings_.end() || it->second->members[place.position].get() != &member) return;
      filling = it->second;
      fillings_.erase(it);
    }
    for (const auto& each : filling->members)
      if (each != nullptr) each->Finish(status);
  }

  static absl::Status GivenUp(const std::string& bucket) {
    return absl::CancelledError("the step was given up before the message " + bucket + " was complete");
  }

 private:
  std::mutex mutex_;  // guards the map and the messages in it, except for the memory of messages
  std::map<std::string, std::shared_ptr<Filling>> fillings_;
};

class MemberOp final : public AsyncKernel {
 public:
  explicit MemberOp(OpKernelConstruction* context) : AsyncKernel(context), destination_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("steps", &steps_));
    OP_REQUIRES_OK(context, context->GetAttr("gradient", &gradient_));
  }

 private:
  absl::Status Start(OpKernelContext* context, const DoneCallback& done) const override {
    CancellationManager* const manager = context->cancellation_manager();
    if (manager == nullptr) return absl::InternalError("merged gradients need steps that can be cancelled");
    const std::shared_ptr<const attach::Stream> stream = StreamOf(context);
    std::shared_ptr<attach::Session> session;
    absl::Status status = destination_.GetSession(steps_, *stream, &session);
    if (!status.ok()) return status;
    const auto steps = attach::SharedSteps::Find(steps_);
    steps->Enter(session);
    const MergingSteps::Place place = steps->With([&](MergingSteps& merged) {
      return merged.RecordGradient(gradient_, context->input(1).NumElements(), Seconds());
    });
    const Caller caller{Caller::Kind::kGraph, context->step_id()};
    const auto member = std::make_shared<Member>(Member{context, done, manager->get_cancellation_token()});
    const auto abandon = [place, member] {
      Fillings::Instance().Abandon(place, *member, Fillings::GivenUp(place.bucket));
    };
    if (!manager->RegisterCallback(member->token, abandon)) return absl::CancelledError("the step has been given up");
    std::shared_ptr<Filling> filling;
    Tensor gradient;
    status = Fillings::Instance().Join(place, member, stream, &filling, &gradient);
    if (!status.ok()) {
      member->Finish(status);
      return absl::OkStatus();
    }
    status = filling->message->Put(place.position, gradient);
    if (!status.ok()) {
      Fillings::Instance().Abandon(place, *member, status);
      return absl::OkStatus();
    }
    if (!Fillings::Instance().Complete(place.bucket, filling)) return absl::OkStatus();
    const absl::Status arrived =
        destination_.Arrive(session, place.bucket, caller, filling->message, 0,
                            [filling](const Operation& operation) { Finish(*filling, operation); });
    if (!arrived.ok())
      for (const auto& each : filling->members) each->Finish(arrived);
    return absl::OkStatus();
  }

  static void Finish(const Filling& filling, const Operation& operation) {
    for (std::size_t i = 0; i < filling.members.size(); ++i) {
      const Member& member = *filling.members[i];
      absl::Status status = operation.error.empty() ? absl::OkStatus() : absl::UnknownError(operation.error);
      if (status.ok()) status = filling.message->SetResult(member.context, 0, i);
      if (status.ok()) status = SetRoundInfo(member.context, 1, operation);
      member.Finish(status);
    }
  }

  const Destination destination_;
  std::string steps_;
  int gradient_ = 0;
};

class StepEndedOp final : public tensorflow::OpKernel {
 public:
  explicit StepEndedOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("steps", &steps_));
  }
  void Compute(OpKernelContext* context) override {
    Tensor* due = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &due));
    try {
      due->scalar<bool>()() =
          attach::SharedSteps::Find(steps_)->With([](MergingSteps& steps) { return steps.StepEnded(Seconds()); });
    } catch (const std::invalid_argument& error) {
      context->SetStatus(absl::InvalidArgumentError(error.what()));
    }
  }

 private:
  std::string steps_;
};

class PlannedOp final : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* /*context*/) override {}
};

REGISTER_KERNELS(Name("HorovodPartialMember")
                     .HostMemory("handle")
                     .HostMemory("info")
                     .HostMemory("members")
                     .HostMemory("member_work"),
                 MemberOp);
REGISTER_KERNELS(Name("HorovodPartialStepEnded").HostMemory("due"), StepEndedOp);
REGISTER_KERNELS(Name("HorovodPartialPlanned").HostMemory("handles"), PlannedOp);

}  // namespace
}  // namespace horovod_partial::tf
