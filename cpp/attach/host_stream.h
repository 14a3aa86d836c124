// The stream of the host, which queues nothing.
#pragma once

#include <cstring>
#include <memory>

#include "attach/device.h"

namespace horovod_partial::attach {

class HostStream final : public Stream {
 public:
  int device() const override { return Memory::kHost; }
  void Copy(void* target, const void* source, std::size_t bytes) const override { std::memcpy(target, source, bytes); }
  void Zero(void* data, std::size_t bytes) const override { std::memset(data, 0, bytes); }
  std::shared_ptr<ReadyEvent> Record() const override { return nullptr; }
  void Synchronize() const override {}
};

}  // namespace horovod_partial::attach
