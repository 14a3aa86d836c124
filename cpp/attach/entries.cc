#include "attach/entries.h"

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "attach/device.h"
#include "attach/envelope.h"
#include "attach/tensors.h"

namespace horovod_partial::attach {

// Returns a row for Horovod's tensor table, with a tensor that has no elements.
hvd::TensorTableEntry Entries::Make(const std::string& bucket, Memory& memory) const {
  hvd::TensorTableEntry entry;
  entry.tensor_name = WireName(bucket);
  entry.context = std::make_shared<BucketContext>(memory);
  entry.device = memory.device();
  entry.process_set_id = process_set_id_;
  entry.tensor = entry.output =
      std::make_shared<TensorView>(nullptr, hvd::HOROVOD_UINT8, std::vector<std::int64_t>{0}, 0);
  entry.callback = [](const hvd::Status&) {};
  return entry;
}

// Adds a tensor to Horovod's tensor table. Returns false if the table has a tensor of this name already.
bool Entries::Insert(hvd::TensorTableEntry entry) {
  auto& queue = QueueAccess::Of(controller_);
  std::lock_guard<std::mutex> lock(queue.mutex_);
  const std::string name = entry.tensor_name;
  return queue.tensor_table_.emplace(name, std::move(entry)).second;
}

void Entries::Add(const std::string& bucket, const BucketConfig& config, const Bucket::Entry& entry,
                  std::function<void(const std::string& error)> finished) {
  hvd::TensorTableEntry made = Make(bucket, *config.memory);
  if (entry.member) {
    const hvd::DataType type = HorovodType(config.type);
    const auto bytes = static_cast<std::int64_t>(config.bytes());
    made.tensor = std::make_shared<TensorView>(entry.input, type, config.shape, bytes);
    made.output = std::make_shared<TensorView>(entry.output, type, config.shape, bytes);
    made.callback = [finished = std::move(finished)](const hvd::Status& status) {
      const std::string error = status.ok() ? "" : status.reason();
      finished(error.empty() && !status.ok() ? "the reduction failed" : error);
    };
  }
  if (!Insert(std::move(made))) throw std::logic_error("Horovod has an entry for " + WireName(bucket) + " already");
}

void Entries::AddForShutdown(std::function<void(const std::string& reason)> shut_down) {
  hvd::TensorTableEntry entry = Make("", Memory::Host());
  entry.callback = [shut_down = std::move(shut_down)](const hvd::Status& status) { shut_down(status.reason()); };
  Insert(std::move(entry));
}

void Entries::AddWhatIsMissing(const hvd::ResponseList& responses) {
  const auto rank = Index(engine_.rank());
  for (const auto& response : responses.responses()) {
    if (!IsOurs(response)) continue;
    const bool error = response.response_type() == hvd::Response::ERROR;
    for (std::size_t i = 0; i < response.tensor_names().size(); ++i)
      AddZeros(BucketName(response.tensor_names()[i]), error ? hvd::HOROVOD_FLOAT32 : response.tensor_type(),
               error ? 0 : response.tensor_sizes()[i], error ? CPU_DEVICE_ID : response.devices()[rank]);
  }
}

void Entries::AddZeros(const std::string& bucket, hvd::DataType type, std::int64_t elements, int device) {
  auto& queue = QueueAccess::Of(controller_);
  {
    std::lock_guard<std::mutex> lock(queue.mutex_);
    if (queue.tensor_table_.count(WireName(bucket)) > 0) return;
  }
  // Chooses the device of the zeros. If this rank has the bucket, its configuration names the device. If this rank has
  // never used the bucket, `device` tells whether the bucket lies on a GPU, but not on which GPU of this rank.
  if (const auto config = engine_.buckets().ConfigOf(bucket)) {
    device = config->memory->device();
  } else if (device != CPU_DEVICE_ID) {
    const int used = engine_.device();
    device = used != CPU_DEVICE_ID ? used : DefaultDevice(controller_.GetLocalRank());
  }
  const auto bytes = static_cast<std::size_t>(elements) * SizeOf(static_cast<DataType>(type));
  auto zeros = std::make_shared<Buffer>();
  const auto make = [&](Memory& memory) {
    *zeros = {};
    zeros->Reserve(bytes, memory);
    if (bytes > 0) zeros->Zero();
  };
  try {
    try {
      make(MemoryOf(device));
    } catch (const std::exception&) {
      make(SpareMemoryOf(device));
    }
  } catch (const std::exception& error) {
    throw EngineError("rank " + std::to_string(engine_.rank()) + " cannot take part with zeros in " + bucket + ": " +
                      error.what());
  }
  hvd::TensorTableEntry entry = Make(bucket, MemoryOf(device));
  entry.tensor = entry.output = std::make_shared<TensorView>(zeros->data(), type, std::vector<std::int64_t>{elements},
                                                             static_cast<std::int64_t>(bytes));
  entry.callback = [zeros](const hvd::Status&) {};
  Insert(std::move(entry));
}

}  // namespace horovod_partial::attach
