// A coordinator, and ranks that say what a test writes in letters.
#pragma once

#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "core/quorum/policy.h"
#include "core/rounds/coordinator.h"
#include "core/rounds/message.h"

namespace horovod_partial::test {

// By bucket. "A.." is bucket a alone, "a:A.. b:.A." are two.
inline std::map<std::string, std::string> LettersOf(const std::string& says) {
  std::map<std::string, std::string> letters;
  std::istringstream words(says);
  for (std::string word; words >> word;) {
    const std::size_t colon = word.find(':');
    letters[colon == std::string::npos ? "a" : word.substr(0, colon)] = word.substr(colon + 1);
  }
  return letters;
}

// A coordinator whose ranks are puppets. What they say is written as one letter for each rank:
//   .  computes         A  arrives with a gradient     D  arrives with nothing but what is pending, which is nothing
//   P  has a gradient pending     B  is blocked        b  is blocked, with a gradient pending
//   K  has a model that was in a round before          k  is blocked, with such a model
//   W  waits for a round, or for a flush
//   R  computes, while a device still reduces the round before
//   C  arrives, and asks for a full round, as after a Clear
//   X  has retired the bucket     x  so, with a gradient pending
//   F  is in a flush    E  is in a flush at its end    f, e  so, with a gradient pending     J  has joined
class Puppets {
 public:
  Puppets(int size, Policy policy) : coordinator(size), policy_(std::move(policy)) {}

  // One cycle, of which `says` has the letters. Gives the closings, separated by commas, as "reason contributions
  // groups". A contribution is F if it is fresh, p if it was pending, k if it is a model that was in a round before,
  // and - if there is none. Groups, if there are any, are one digit for each rank, or - for a rank in no group. With
  // several buckets it names them, and says which closings belong to a flush and which one ends it.
  std::string Cycle(const std::string& says) {
    const auto letters = LettersOf(says);
    const std::size_t size = letters.begin()->second.size();
    std::vector<bool> joined(size);
    for (std::size_t rank = 0; rank < size; ++rank) {
      Report report;
      for (const auto& [bucket, row] : letters) {
        const char letter = row[rank];
        if (letter == 'A' || letter == 'C' || letter == 'D') AddArrival(report, bucket, letter);
        if (letter == 'R') AddItem(report, bucket, Report::Item::Kind::kRunning);
        if (letter == 'X' || letter == 'x')
          AddItem(report, bucket, Report::Item::Kind::kRetired, letter == 'x', letter == 'x');
        if (std::string("Pbfe").find(letter) != std::string::npos)
          AddItem(report, bucket, Report::Item::Kind::kPending, 1, 1).age = age;
        if (letter == 'K' || letter == 'k') AddItem(report, bucket, Report::Item::Kind::kPending, 1);
        if (letter == 'B' || letter == 'b' || letter == 'k') report.absent.all = true;
        if (letter == 'W') report.waiting.all = true;
        if (letter == 'F' || letter == 'f') report.flush = Report::Flush::kFlushing;
        if (letter == 'E' || letter == 'e') report.flush = Report::Flush::kEnding;
        if (report.flush != Report::Flush::kNone) report.absent.all = true;
        report.blocked = report.absent.all || report.waiting.all;
        if (letter == 'J') joined[rank] = true;
      }
      coordinator.Observe(static_cast<Rank>(rank), report, now);
    }
    coordinator.SetJoined(joined);
    last = coordinator.Decide(now);
    std::string text;
    for (const Closing& closing : last) {
      text += (text.empty() ? "" : ", ") + (letters.size() > 1 ? closing.bucket + " " : "") + Describe(closing);
      if (letters.size() > 1 && closing.flushes) text += " (of the flush)";
      if (letters.size() > 1 && closing.flush_over != Report::Flush::kNone) text += " (its end)";
      if (closing.ends) seen_.erase(closing.bucket);
      if (closing.reason == Closing::Reason::kFirst) seen_.insert(closing.bucket);
    }
    return text;
  }

  Coordinator coordinator;
  Time now{0};
  Time age{0};  // of what is pending
  std::vector<Closing> last;

 private:
  static std::string Describe(const Closing& closing) {
    std::string text = std::string(NameOf(closing.reason)) + " ";
    for (const auto& contribution : closing.contributions)
      text += contribution.fresh ? 'F' : contribution.gradients == 0 ? '-' : contribution.stale ? 'k' : 'p';
    if (!closing.groups.empty()) text += " ";
    for (const int group : closing.groups) text += group == kNoGroup ? "-" : std::to_string(group);
    return text + (closing.ends ? " and ends" : "");
  }
  void AddArrival(Report& report, const std::string& bucket, char letter) {
    Report::Item& item = AddItem(report, bucket, Report::Item::Kind::kArrival, letter == 'D' ? 0 : 1);
    item.full = letter == 'C';
    if (seen_.count(bucket) == 0) item.declaration = Declaration{policy_};
  }
  static Report::Item& AddItem(Report& report, const std::string& bucket, Report::Item::Kind kind, int gradients = 0,
                               int late = 0) {
    Report::Item& item = report.items.emplace_back();
    item.kind = kind;
    item.bucket = bucket;
    item.gradients = gradients;
    item.late = late;
    return item;
  }

  Policy policy_;
  std::set<std::string> seen_;  // buckets that have had a round
};

}  // namespace horovod_partial::test
