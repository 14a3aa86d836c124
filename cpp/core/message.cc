#include "core/message.h"

#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace horovod_partial {
namespace {

// All ranks of a job run the same build (the handshake checks it), so plain host order will do.
class Writer {
 public:
  template <class T>
  void Put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void Put(const std::string& text) {
    Put(static_cast<std::uint32_t>(text.size()));
    bytes_ += text;
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  template <class T>
  T Get() {
    T value;
    std::memcpy(&value, Advance(sizeof value), sizeof value);
    return value;
  }
  std::string GetString() {
    const auto size = Get<std::uint32_t>();
    return std::string(Advance(size), size);
  }
  void ExpectEnd() const {
    if (at_ != bytes_.size()) throw std::runtime_error("a report has trailing bytes");
  }

 private:
  const char* Advance(std::size_t size) {
    if (bytes_.size() - at_ < size) throw std::runtime_error("a report is cut short");
    const char* here = bytes_.data() + at_;
    at_ += size;
    return here;
  }

  const std::string& bytes_;
  std::size_t at_ = 0;
};

}  // namespace

int Closing::fresh() const {
  int count = 0;
  for (const auto& contribution : contributions) count += contribution.fresh ? 1 : 0;
  return count;
}

int Closing::gradients() const {
  int count = 0;
  for (const auto& contribution : contributions) count += contribution.gradients;
  return count;
}

const char* NameOf(Closing::Reason reason) {
  static const char* const names[] = {"first", "everybody", "quorum", "liveness", "flush", "end"};
  return names[static_cast<std::size_t>(reason)];
}

std::string Encode(const Report& report) {
  Writer out;
  out.Put(report.blocked);
  out.Put(report.waiting);
  out.Put(report.flush);
  out.Put(static_cast<std::uint32_t>(report.items.size()));
  for (const auto& item : report.items) {
    out.Put(item.kind);
    out.Put(item.bucket);
    out.Put(static_cast<std::int32_t>(item.gradients));
    out.Put(static_cast<std::int64_t>(item.age.count()));
    out.Put(item.full);
    out.Put(item.declares);
    if (!item.declares) continue;
    out.Put(item.policy.rule);
    out.Put(static_cast<std::int32_t>(item.policy.quorum));
    out.Put(item.policy.seed);
    out.Put(item.policy.max_staleness);
    out.Put(static_cast<std::int64_t>(item.policy.grace.count()));
    out.Put(item.policy.description);
  }
  return out.Take();
}

Report DecodeReport(const std::string& bytes) {
  Reader in(bytes);
  Report report;
  report.blocked = in.Get<bool>();
  report.waiting = in.Get<bool>();
  report.flush = in.Get<Report::Flush>();
  const auto items = in.Get<std::uint32_t>();
  for (std::uint32_t i = 0; i < items; ++i) {
    Report::Item item;
    item.kind = in.Get<Report::Item::Kind>();
    item.bucket = in.GetString();
    item.gradients = in.Get<std::int32_t>();
    item.age = Time(in.Get<std::int64_t>());
    item.full = in.Get<bool>();
    item.declares = in.Get<bool>();
    if (item.declares) {
      item.policy.rule = in.Get<Policy::Rule>();
      item.policy.quorum = in.Get<std::int32_t>();
      item.policy.seed = in.Get<std::uint64_t>();
      item.policy.max_staleness = in.Get<Round>();
      item.policy.grace = Time(in.Get<std::int64_t>());
      item.policy.description = in.GetString();
    }
    report.items.push_back(std::move(item));
  }
  in.ExpectEnd();
  return report;
}

void Append(const Closing& closing, std::vector<std::int32_t>& words) {
  const auto round = static_cast<std::uint64_t>(closing.round);
  words.push_back(static_cast<std::int32_t>(closing.contributions.size()));
  words.push_back(static_cast<std::int32_t>(static_cast<std::uint32_t>(round)));
  words.push_back(static_cast<std::int32_t>(static_cast<std::uint32_t>(round >> 32)));
  words.push_back(static_cast<std::int32_t>(closing.reason));
  for (const auto& contribution : closing.contributions)
    words.push_back(contribution.gradients * 2 + (contribution.fresh ? 1 : 0));
}

Closing DecodeClosing(const std::vector<std::int32_t>& words, std::size_t& at) {
  constexpr std::size_t kHeader = 4;
  if (words.size() < at + kHeader) throw std::runtime_error("a closing is cut short");
  const auto ranks = static_cast<std::size_t>(words[at]);
  if (words.size() - at - kHeader < ranks) throw std::runtime_error("a closing is cut short");
  Closing closing;
  closing.round = static_cast<Round>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(words[at + 1])) |
                                     static_cast<std::uint64_t>(static_cast<std::uint32_t>(words[at + 2])) << 32);
  closing.reason = static_cast<Closing::Reason>(words[at + 3]);
  for (std::size_t r = 0; r < ranks; ++r) {
    const std::int32_t word = words[at + kHeader + r];
    closing.contributions.push_back({word / 2, word % 2 != 0});
  }
  at += kHeader + ranks;
  return closing;
}

}  // namespace horovod_partial
