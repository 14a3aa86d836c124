// When does a graph wait for rounds?
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "attach/session.h"

namespace horovod_partial::tf {

// No thread of a graph waits in the engine. A rank counts as waiting (docs/protocol.md, rule 7) once all buckets of a
// step have arrived: until then the graph may be busy with what the others need. Any thread.
class StepWaits {
 public:
  struct Arrival {
    std::shared_ptr<attach::Session> session;
    std::shared_ptr<BucketHandle> bucket;
    std::shared_ptr<Work> work;
  };

  // One of the `buckets` buckets of a step; `run` is TensorFlow's number for what runs it.
  void Add(const std::string& step, std::int64_t run, std::size_t buckets, Arrival arrival) {
    std::vector<Arrival> complete;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const Key key{arrival.session.get(), step};
      auto& [earlier, arrived] = arrived_[key];
      if (std::exchange(earlier, run) != run) arrived.clear();  // a step of another run was given up halfway
      arrived.push_back(std::move(arrival));
      if (arrived.size() < buckets) return;
      complete = std::move(arrived);
      arrived_.erase(key);
    }
    for (const auto& [session, bucket, work] : complete) session->engine().CountAsWaiting(*bucket, *work);
  }

 private:
  using Key = std::pair<const attach::Session*, std::string>;

  std::mutex mutex_;
  std::map<Key, std::pair<std::int64_t, std::vector<Arrival>>> arrived_;  // of steps that are not complete, by run
};

}  // namespace horovod_partial::tf
