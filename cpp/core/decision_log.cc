#include "core/decision_log.h"

#include <istream>
#include <memory>
#include <ostream>
#include <sstream>
#include <stdexcept>

#include "core/coordinator.h"

namespace horovod_partial {
namespace {

const char* const kHeader = "horovod_partial decisions 2 ranks";

std::string ToHex(const std::string& bytes) {
  static const char* const digits = "0123456789abcdef";
  std::string hex;
  for (const char byte : bytes) {
    const auto value = static_cast<unsigned char>(byte);
    hex += digits[value / 16];
    hex += digits[value % 16];
  }
  return hex.empty() ? "-" : hex;
}

std::string FromHex(const std::string& hex) {
  std::string bytes;
  if (hex == "-") return bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

// A closing in words: what the log holds, and what a difference shows.
std::string Describe(const Closing& closing) {
  std::ostringstream text;
  text << "round " << closing.round << " of " << closing.bucket << " by " << NameOf(closing.reason) << ":";
  for (const auto& contribution : closing.contributions)
    text << ' ' << contribution.gradients << (contribution.fresh ? "" : "(late)");
  if (closing.ends) text << ", the last one";
  if (!closing.error.empty()) text << " refused: " << closing.error;
  return text.str();
}

}  // namespace

DecisionLog::DecisionLog(std::ostream& out, int size, Time deadlock_after)
    : out_(out), joined_(static_cast<std::size_t>(size), false) {
  out_ << kHeader << ' ' << size << " deadlocked after " << deadlock_after.count() << '\n';
}

void DecisionLog::Observe(Rank rank, const Report& report, Time now) {
  out_ << "observe " << now.count() << ' ' << rank << ' ' << ToHex(Encode(report)) << '\n';
}

void DecisionLog::SetJoined(const std::vector<bool>& joined) {
  if (joined == joined_) return;
  joined_ = joined;
  out_ << "joined ";
  for (const bool rank : joined) out_ << (rank ? '1' : '0');
  out_ << '\n';
}

void DecisionLog::Decide(Time now, const std::vector<Closing>& closings) {
  out_ << "decide " << now.count() << ' ' << closings.size() << '\n';
  for (const auto& closing : closings) out_ << Describe(closing) << '\n';
  if (!closings.empty()) out_.flush();
}

void DecisionLog::Forget(const std::string& bucket) { out_ << "forget " << ToHex(bucket) << '\n'; }

Replay ReplayDecisions(std::istream& in) {
  std::string line;
  std::getline(in, line);
  if (line.compare(0, std::string(kHeader).size(), kHeader) != 0) throw std::runtime_error("not a decision log");
  std::istringstream header(line.substr(std::string(kHeader).size()));
  int size = 0;
  std::string word;
  Time::rep deadlock_after = 0;
  header >> size >> word >> word >> deadlock_after;
  Coordinator coordinator(size);
  coordinator.SetDeadlockAfter(Time(deadlock_after));
  Replay replay;
  while (std::getline(in, line)) {
    std::istringstream words(line);
    std::string event;
    words >> event;
    if (event == "observe") {
      Time::rep now = 0;
      Rank rank = 0;
      std::string report;
      words >> now >> rank >> report;
      coordinator.Observe(rank, DecodeReport(FromHex(report)), Time(now));
    } else if (event == "joined") {
      std::string bits;
      words >> bits;
      std::vector<bool> joined;
      for (const char bit : bits) joined.push_back(bit == '1');
      coordinator.SetJoined(joined);
    } else if (event == "forget") {
      std::string bucket;
      words >> bucket;
      coordinator.Forget(FromHex(bucket));
    } else if (event == "decide") {
      Time::rep now = 0;
      std::size_t count = 0;
      words >> now >> count;
      std::string recorded;
      for (std::size_t i = 0; i < count && std::getline(in, line); ++i) recorded += line + '\n';
      std::string decided;
      for (const auto& closing : coordinator.Decide(Time(now))) {
        decided += Describe(closing) + '\n';
        ++replay.rounds;
      }
      if (!decided.empty()) ++replay.decisions;
      if (decided != recorded) {
        replay.difference = "recorded:\n" + recorded + "replayed:\n" + decided;
        return replay;
      }
    } else {
      throw std::runtime_error("a decision log cannot hold: " + line);
    }
  }
  return replay;
}

}  // namespace horovod_partial
