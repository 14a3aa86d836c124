#include "core/decision_log.h"

#include <istream>
#include <limits>
#include <memory>
#include <ostream>
#include <sstream>
#include <stdexcept>

#include "core/coordinator.h"
#include "core/hex.h"

namespace horovod_partial {
namespace {

const char* const kHeader = "horovod_partial decisions 5 ranks";
constexpr int kMostRanks = 1 << 16;

// A word for some bytes: there is one for none too.
std::string ToWord(const std::string& bytes) { return bytes.empty() ? "-" : ToHex(bytes); }

std::string FromWord(const std::string& word) { return word == "-" ? "" : FromHex(word, "a decision log"); }

// The words of one line.
class Line {
 public:
  explicit Line(const std::string& text) : text_(text), words_(text) {}

  std::string Word() {
    std::string word;
    Require(static_cast<bool>(words_ >> word));
    return word;
  }
  // From `least` to `most`.
  template <class Number>
  Number Get(Number least, Number most) {
    Number number{};
    Require(static_cast<bool>(words_ >> number) && number >= least && number <= most);
    return number;
  }
  Time GetTime() { return Time(Get<Time::rep>(0, kLatest.count())); }
  void Require(bool holds) const {
    if (!holds) throw std::runtime_error("a decision log cannot hold: " + text_);
  }

 private:
  static constexpr Time kLatest = std::chrono::hours(24 * 365 * 100);

  const std::string text_;
  std::istringstream words_;
};

// A closing in words: what the log holds, and what a difference shows.
std::string Describe(const Closing& closing) {
  std::ostringstream text;
  text << "round " << closing.round << " of " << closing.bucket << " by " << NameOf(closing.reason) << ":";
  for (const auto& contribution : closing.contributions)
    text << ' ' << contribution.gradients << (contribution.fresh ? "" : "(late)");
  if (closing.quorum > 0)
    text << ", quorum " << closing.quorum << " (" << NamesOf(closing.why)[static_cast<std::size_t>(closing.why)] << ")";
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
  out_ << "observe " << now.count() << ' ' << rank << ' ' << ToWord(Encode(report)) << '\n';
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

void DecisionLog::Forget(const std::string& bucket) { out_ << "forget " << ToWord(bucket) << '\n'; }

Replay ReplayDecisions(std::istream& in) {
  std::string line;
  std::getline(in, line);
  if (line.compare(0, std::string(kHeader).size(), kHeader) != 0) throw std::runtime_error("not a decision log");
  Line header(line.substr(std::string(kHeader).size()));
  const int size = header.Get(1, kMostRanks);
  header.Require(header.Word() == "deadlocked" && header.Word() == "after");
  Coordinator coordinator(size);
  // Never, where the stall check is off.
  coordinator.SetDeadlockAfter(Time(header.Get<Time::rep>(0, kNever.count())));
  Replay replay;
  while (std::getline(in, line)) {
    Line words(line);
    const std::string event = words.Word();
    if (event == "observe") {
      const Time now = words.GetTime();
      const Rank rank = words.Get(0, size - 1);
      coordinator.Observe(rank, DecodeReport(FromWord(words.Word())), now);
    } else if (event == "joined") {
      std::vector<bool> joined;
      for (const char bit : words.Word()) joined.push_back(bit == '1');
      words.Require(joined.size() == static_cast<std::size_t>(size));
      coordinator.SetJoined(joined);
    } else if (event == "forget") {
      coordinator.Forget(FromWord(words.Word()));
    } else if (event == "decide") {
      const Time now = words.GetTime();
      const auto count = words.Get<std::size_t>(0, std::numeric_limits<std::size_t>::max());
      std::string recorded;
      for (std::size_t i = 0; i < count && std::getline(in, line); ++i) recorded += line + '\n';
      std::string decided;
      for (const auto& closing : coordinator.Decide(now)) {
        decided += Describe(closing) + '\n';
        ++replay.rounds;
      }
      if (!decided.empty()) ++replay.decisions;
      if (decided != recorded) {
        replay.difference = "recorded:\n" + recorded + "replayed:\n" + decided;
        return replay;
      }
    } else {
      words.Require(false);
    }
  }
  return replay;
}

}  // namespace horovod_partial
