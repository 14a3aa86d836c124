#include "attach/gloo_group.h"

#if HAVE_GLOO
#include <gloo/transport/context.h>
#include <gloo/transport/unbound_buffer.h>

#include <stdexcept>
#include <utility>

namespace horovod_partial::attach {
namespace {

// Wraps a buffer of the Gloo context of all ranks. Translates between ranks in a group and ranks in that context.
class GroupBuffer final : public gloo::transport::UnboundBuffer {
 public:
  GroupBuffer(std::unique_ptr<UnboundBuffer> buffer, const Members& members)
      : UnboundBuffer(buffer->ptr, buffer->size), buffer_(std::move(buffer)), members_(members) {}

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    const bool completed = buffer_->waitRecv(rank, timeout);
    if (completed && rank != nullptr) *rank = PlaceOf(members_, *rank);
    return completed;
  }
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    const bool completed = buffer_->waitSend(rank, timeout);
    if (completed && rank != nullptr) *rank = PlaceOf(members_, *rank);
    return completed;
  }
  void abortWaitRecv() override { buffer_->abortWaitRecv(); }
  void abortWaitSend() override { buffer_->abortWaitSend(); }
  void send(int to, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
    buffer_->send(RankOf(to), slot, offset, bytes);
  }
  void recv(int from, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
    buffer_->recv(RankOf(from), slot, offset, bytes);
  }
  void recv(std::vector<int> from, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
    for (int& rank : from) rank = RankOf(rank);
    buffer_->recv(std::move(from), slot, offset, bytes);
  }

 private:
  Rank RankOf(int place) const { return members_.at(Index(place)); }

  const std::unique_ptr<UnboundBuffer> buffer_;
  const Members members_;
};

class GroupTransport final : public gloo::transport::Context {
 public:
  GroupTransport(std::shared_ptr<gloo::Context> whole, const Members& members, int place)
      : Context(place, static_cast<int>(members.size())), whole_(std::move(whole)), members_(members) {
    setTimeout(whole_->getTimeout());
  }

  std::unique_ptr<gloo::transport::Pair>& getPair(int place) override {
    return whole_->getPair(members_.at(Index(place)));
  }
  std::unique_ptr<gloo::transport::Pair>& createPair(int) override {
    throw std::logic_error("a group makes no connections");
  }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* pointer, std::size_t bytes) override {
    return std::make_unique<GroupBuffer>(whole_->createUnboundBuffer(pointer, bytes), members_);
  }

 private:
  const std::shared_ptr<gloo::Context> whole_;
  const Members members_;
};

class GroupContext final : public gloo::Context {
 public:
  GroupContext(std::shared_ptr<gloo::Context> whole, const Members& members, int place)
      : Context(place, static_cast<int>(members.size()), whole->base) {
    device_ = whole->getDevice();
    setTimeout(whole->getTimeout());
    transportContext_ = std::make_shared<GroupTransport>(std::move(whole), members, place);
  }
};

}  // namespace

std::shared_ptr<gloo::Context> MakeGlooGroup(std::shared_ptr<gloo::Context> whole, const Members& members) {
  const int place = PlaceOf(members, whole->rank);
  return std::make_shared<GroupContext>(std::move(whole), members, place);
}

}  // namespace horovod_partial::attach
#endif
