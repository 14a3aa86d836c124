#include "attach/coordination.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

#include "attach/envelope.h"
#include "attach/group_communicators.h"
#include "attach/tensors.h"
#include "engine/farewell.h"
#include "engine/log.h"
#include "engine/surroundings.h"

namespace horovod_partial::attach {
namespace {

// Tensors of this size and more are not fused with others. Fusion saves the latency of a reduction, but costs two
// copies. With 4 ranks on one machine the copies cost more than the latency from 256 KiB (MPI) or 4 MiB (Gloo) on.
constexpr std::int64_t kLargeBytes = 4 << 20;
#if HAVE_NCCL
constexpr bool kHooksGpus = true;
#else
constexpr bool kHooksGpus = false;
#endif

std::atomic<Time> last_logged_wait{Time::min()};  // when the heartbeats of this process last logged a long wait

// Returns how long ranks may wait for each other before their waits fail. Returns kNever if Horovod's stall check is
// off. Otherwise returns Horovod's warning time (at least 1 s) if the user has set it, else our default.
Time DeadlockAfter(hvd::Controller& controller) {
  const auto& inspector = StallInspectorAccess::Of(controller);
  if (!inspector.perform_stall_check) return kNever;
  if (std::getenv("HOROVOD_STALL_CHECK_TIME_SECONDS") == nullptr) return Coordinator::kDeadlockAfter;
  return std::chrono::seconds(std::max(1, inspector.stall_warning_time_seconds));
}

// Splits responses in which Horovod has fused tensors of buckets. A large tensor gets a response of its own, so that it
// is reduced in place. So does a bucket that fails with an error. The others stay together if they have equal groups.
std::vector<hvd::Response> Unfused(const std::vector<hvd::Response>& responses,
                                   const std::map<std::string, Closing>& closed) {
  std::vector<hvd::Response> list;
  for (const auto& response : responses) {
    if (!IsOurs(response) || response.tensor_names().size() < 2) {
      list.push_back(response);
      continue;
    }
    const auto element_bytes = static_cast<std::int64_t>(SizeOf(static_cast<DataType>(response.tensor_type())));
    std::map<Partition, std::size_t> together;  // for each division into groups: the index of its response in `list`
    for (std::size_t i = 0; i < response.tensor_names().size(); ++i) {
      const std::string& name = response.tensor_names()[i];
      const std::int64_t elements = response.tensor_sizes()[i];
      const Closing& closing = closed.at(name);
      const bool alone = elements * element_bytes >= kLargeBytes || !closing.error.empty();
      const auto known = alone ? together.end() : together.find(closing.groups);
      if (known != together.end()) {
        list[known->second].add_tensor_name(name);
        list[known->second].add_tensor_size(elements);
        continue;
      }
      if (!alone) together[closing.groups] = list.size();
      list.push_back(response);
      list.back().set_tensor_names({name});
      list.back().set_tensor_sizes({elements});
    }
  }
  return list;
}

}  // namespace

void NoteLoggedWait() { last_logged_wait = Now(); }

std::string Failed(Rank rank) { return "rank " + std::to_string(rank) + " has failed: "; }

void Coordination::Begin(hvd::HorovodGlobalState& state, bool for_all_ranks) {
  state_ = &state;
  coordinator_.SetDeadlockAfter(for_all_ranks ? DeadlockAfter(controller_) : kNever);
}

bool Coordination::WatchWaits(Time now) {
  const auto& inspector = StallInspectorAccess::Of(controller_);
  const Time warn_after = std::chrono::seconds(inspector.stall_warning_time_seconds);
  const Time end_after = std::chrono::seconds(inspector.stall_shutdown_time_seconds);
  if (!inspector.perform_stall_check || now - last_watch_ < warn_after / 10) return false;
  last_watch_ = now;
  const bool ends = end_after > Time(0) && end_after >= warn_after && coordinator_.OldestWait() < now - end_after;
  const bool explained = !ends && last_logged_wait.load() >= coordinator_.OldestWait();
  const std::string waits = coordinator_.DescribeWaits(now - warn_after, explained);
  if (waits == warned_ && !ends) return false;
  warned_ = waits;
  if (waits.empty()) return false;
  const std::string text = "waiting for " + std::to_string(inspector.stall_warning_time_seconds) + " s and longer: ";
  Log(LogLevel::kWarning, 0, text + waits);
  if (ends) Log(LogLevel::kError, 0, "all ranks shut down, as HOROVOD_STALL_SHUTDOWN_TIME_SECONDS says");
  return ends;
}

bool Coordination::TakeReports(std::vector<hvd::RequestList>& ready, Time now) {
  bool fails = false;
  for (Rank rank = 1; rank < size_; ++rank) {
    auto& list = ready[Index(rank)];
    Report report;
    std::vector<hvd::Request> others;
    for (const auto& request : list.requests()) {
      if (auto opened = Open(request)) {
        report = std::move(*opened);
        continue;
      }
      if (request.request_type() == hvd::Request::JOIN) {
        joined_[Index(rank)] = true;
        join_devices_[rank] = request.device();
      }
      others.push_back(request);
    }
    if (others.size() < list.requests().size()) list.set_requests(others);
    fails = fails || (list.shutdown() && !report.failure.empty());
    Observe(rank, report, now);
  }
  return fails;
}

void Coordination::Observe(Rank rank, const Report& report, Time now) {
  hvd::Timeline& timeline = ControllerAccess::Of(controller_).timeline_;
  for (const auto& item : report.items) {
    if (item.kind != Report::Item::Kind::kArrival) continue;
    timeline.NegotiateStart(WireName(item.bucket), hvd::Request::ALLREDUCE);
    timeline.NegotiateRankReady(WireName(item.bucket), rank);
  }
  if (!report.failure.empty()) NoteFailure(rank, report.failure);
  std::lock_guard<std::mutex> lock(mutex_);
  coordinator_.Observe(rank, report, now);
}

void Coordination::NoteFailure(Rank rank, const std::string& failure) {
  failures_ += failures_.empty() ? Failed(rank) + failure : "; so has rank " + std::to_string(rank);
}

std::vector<Closing> Coordination::Decide(const Report* own, bool joined, Time now) {
  joined_[0] = joined;
  if (joined) {
    auto& queue = QueueAccess::Of(controller_);
    std::lock_guard<std::mutex> lock(queue.mutex_);
    join_devices_[0] = queue.tensor_table_.at(JOIN_TENSOR_NAME).device;
  }
  std::vector<Closing> closings;
  if (own != nullptr) {
    Observe(0, *own, now);
    std::lock_guard<std::mutex> lock(mutex_);
    coordinator_.SetJoined(joined_);
    closings = coordinator_.Decide(now);
    grants_ = coordinator_.grants();
    if (!coordinator_.deadlock().empty()) {
      Closing& deadlock = closings.emplace_back();
      deadlock.bucket = FirstFailure::kDeadlock;
      deadlock.error = coordinator_.deadlock();
    }
  }
  if (!failures_.empty()) {
    Closing& farewell = closings.emplace_back();
    farewell.bucket = Farewell::kBucket;
    farewell.error = std::exchange(failures_, "");
  }
  // Most cycles close no round. Horovod's settings are read only in a cycle that closes a round.
  const std::string refusal = closings.empty() ? "" : GroupCommunicators::Refusal(*state_);
  for (auto& closing : closings) {
    if (closing.ends && !refusal.empty()) closing.groups.clear();  // without groups all ranks reduce, some with zeros
    if (closing.error.empty()) closing.error = LeaveOutZerosElsewhere(closing, refusal);
    const bool grouped = !closing.groups.empty() || !closing.upcoming.empty();
    if (closing.error.empty() && grouped && !refusal.empty())
      closing.error = "groups of ranks do not work with Horovod's operation " + refusal + ".";
  }
  return closings;
}

// Leaves joined ranks out of a round if the reduction cannot read their zeros. Horovod puts the zeros of a joined rank
// on the device that its join names. NCCL does not read host memory, and Gloo and MPI do not read the memory of a GPU.
// Returns an error if a rank cannot be left out. `refusal` says why groups do not work; it is empty if they do.
std::string Coordination::LeaveOutZerosElsewhere(Closing& closing, const std::string& refusal) const {
  const auto on_host = [](int device) { return device == CPU_DEVICE_ID; };
  for (Rank rank = 0; rank < size_; ++rank) {
    const auto at = Index(rank);
    if (!joined_[at]) continue;
    const bool joined_on_host = on_host(join_devices_.at(rank));
    if (joined_on_host == on_host(coordinator_.declaration(closing.bucket).device)) continue;
    // A joined rank executes the response, too. Only our hook leaves it out, and on GPUs only NCCLAllreduce has a hook.
    if (!refusal.empty() || (!joined_on_host && !kHooksGpus)) {
      return "rank " + std::to_string(rank) + " has joined with " + (joined_on_host ? "the CPU" : "a GPU") +
             " as its device, and " + closing.bucket + " lies on " + (joined_on_host ? "GPUs" : "CPUs") +
             ": give hvd.join the device=" + (joined_on_host ? " of that rank's tensors" : "-1") +
             " there, or do without Horovod's operation " + (refusal.empty() ? "MPI_GPUAllreduce" : refusal) + ".";
    }
    if (closing.groups.empty()) closing.groups.assign(joined_.size(), 0);  // first puts all ranks into one group
    closing.groups[at] = kNoGroup;
  }
  return "";
}

std::vector<hvd::Request> Coordination::RowOf(const Closing& closing) const {
  // If a round fails with an error, nothing is reduced, and the coordinator may have no declaration of the bucket.
  static const auto* const nothing = new Declaration;
  const bool refused = !closing.error.empty();
  const Declaration& declaration = refused ? *nothing : coordinator_.declaration(closing.bucket);
  hvd::Request request;
  request.set_request_type(hvd::Request::ALLREDUCE);
  request.set_tensor_name(WireName(closing.bucket));
  request.set_tensor_type(HorovodType(declaration.type));
  request.set_tensor_shape(declaration.shape);
  request.set_reduce_op(TravellingSum());
  request.set_prescale_factor(declaration.prescale_factor);
  request.set_postscale_factor(declaration.postscale_factor);
  std::vector<hvd::Request> row(static_cast<std::size_t>(size_), request);
  for (Rank rank = 0; rank < size_; ++rank) {
    row[Index(rank)].set_request_rank(rank);
    row[Index(rank)].set_device(refused ? CPU_DEVICE_ID : coordinator_.device(closing.bucket, rank));
  }
  return row;
}

void Coordination::Add(std::vector<Closing> closings, std::vector<std::vector<hvd::Request>> rows,
                       std::vector<std::string>& ready_to_reduce) {
  hvd::Timeline& timeline = ControllerAccess::Of(controller_).timeline_;
  for (std::size_t i = 0; i < closings.size(); ++i) {
    const std::string name = WireName(closings[i].bucket);
    timeline.NegotiateStart(name, hvd::Request::ALLREDUCE);  // Horovod's timeline needs a start even without an arrival
    timeline.NegotiateEnd(name);
    ControllerAccess::Of(controller_).message_table_[name] = std::move(rows[i]);
    ready_to_reduce.push_back(name);
    closed_[name] = std::move(closings[i]);
  }
}

void Coordination::Enclose(hvd::ResponseList& responses) {
  for (const auto& response : responses.responses())
    if (response.response_type() == hvd::Response::JOIN) joined_.assign(joined_.size(), false);
  if (!HasOurs(responses) && grants_.empty()) return;
  std::vector<hvd::Response> list = Unfused(responses.responses(), closed_);
  for (auto& response : list) {
    if (!IsOurs(response)) continue;
    const std::string& first = response.tensor_names()[0];
    const std::string& error = closed_.at(first).error;
    if (!error.empty()) {
      response.set_response_type(hvd::Response::ERROR);
      response.set_error_message(error);
      std::lock_guard<std::mutex> lock(mutex_);
      coordinator_.Forget(BucketName(first));
      continue;
    }
    std::vector<Closing> closings;
    for (const auto& name : response.tensor_names()) closings.push_back(closed_.at(name));
    attach::Enclose(closings, response);
  }
  if (!grants_.empty()) list.push_back(Enclosed(std::exchange(grants_, {})));
  responses.set_responses(list);
}

bool Coordination::AddFailure(const std::string& failure, hvd::ResponseList& responses) {
  const std::string name = WireName(Farewell::kBucket);
  if (closed_.count(name) > 0) return false;
  Closing& farewell = closed_[name];
  farewell.bucket = Farewell::kBucket;
  farewell.error = Failed(0) + failure;
  hvd::Response response;
  response.set_response_type(hvd::Response::ERROR);
  response.set_tensor_names({name});
  responses.add_response(response);
  return true;
}

Coordination::Statistics Coordination::statistics() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return coordinator_.Counted();
}

}  // namespace horovod_partial::attach
