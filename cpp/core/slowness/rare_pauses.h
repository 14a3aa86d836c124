// Finds the ranks that pause now and then, so that all others wait. An example is rank 0 if it alone evaluates or
// saves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/slowness/slow_rank.h"
#include "core/values/types.h"

namespace horovod_partial {

// A pause is a step in which a rank takes much longer than the median rank. If ranks are alike, each of them is equally
// likely to pause. So each rank bets that the next pause is its own. What it wins is a test martingale: if ranks are
// alike, its stake ever becomes N times as large with a probability of at most 1 / N (Ville, 1939). Each length of
// pauses has bets of its own, so frequent short pauses of all ranks do not hide the long ones of one rank.
class RarePauses {
 public:
  explicit RarePauses(int size) : ranks_(static_cast<std::size_t>(size)) {}

  // Steps must be observed in order. `seconds`: how long each rank computed; NaN for a rank that did not take part.
  // `median`: the median of `seconds`. `usual`: the seconds that a step usually takes the median rank; above 0.
  void Observe(std::int64_t step, const std::vector<double>& seconds, double median, double usual);

  // Returns what the last step has changed. kBegins: the rank is found to pause. kChanges: a rank that was found has
  // paused again. kEnds: its pauses are over.
  SlowRank::Change change(Rank rank) const { return ranks_[Index(rank)].change; }
  // Returns the newest finding about a rank, if there is one. While the pauses go on, it has the end -1.
  const std::optional<Slowness>& found(Rank rank) const { return ranks_[Index(rank)].found; }

 private:
  // By how many usual steps a pause of each length is longer than the median rank's step, at least.
  static constexpr std::array<double, 8> kLengths = {0.5, 1, 2, 4, 8, 16, 32, 64};
  static constexpr std::array<double, 2> kStakes = {4, 64};  // a bet says that a rank pauses so many times as often
  using Won = std::array<double, kStakes.size()>;

  struct Pause {
    std::int64_t step;
    double seconds;  // the time beyond the median rank's
    double time;     // RarePauses::time_ after this step
    Won won;         // Track::won before this step
  };
  // The pauses of one rank that have at least one of kLengths.
  struct Track {
    std::int64_t last = -1'000'000;  // the last step that was so long
    std::int64_t before = 0;         // the number of older pauses, which are no evidence any more
    std::vector<Pause> pauses{};     // the last pauses, which are evidence
    Won won{};                       // the logarithm of what each bet has won
    bool suffices = false;           // true if the evidence is enough

    double Evidence() const;
    double Share() const;
    std::vector<double> Periods(std::size_t from) const;
    double Patience(std::size_t from) const;
    void Forget(std::size_t count);
  };
  struct JudgedRank {
    std::array<Track, kLengths.size()> tracks;
    bool pauses = false;     // true if a pause begins in the present step
    std::int64_t until = 0;  // the last step in which the next pause is expected
    std::optional<Slowness> found;
    SlowRank::Change change = SlowRank::Change::kNone;
  };

  void Bet(std::size_t which, std::int64_t step, const std::vector<double>& seconds, double median, double usual);
  bool IsEnough(const Track& track) const;
  void Judge(Rank number, std::int64_t step, double usual);

  std::vector<JudgedRank> ranks_;
  double time_ = 0;  // the sum over all steps of the slowest rank's time, in seconds
};

}  // namespace horovod_partial
