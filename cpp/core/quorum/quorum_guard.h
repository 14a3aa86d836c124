// Chooses one of a few candidate quorums, from predicted rates and from the measured rate.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <vector>

namespace horovod_partial {

// Decides on the quorum once in each period of rounds. Candidate 0 is a quorum of all ranks; higher numbers are smaller
// quorums. A change is on trial: it stays if the measured rate confirms it, and is taken back otherwise. A change up,
// towards all ranks, may lose a little speed. A change down must gain more than that, so the same rates never confirm
// both. Under a constant load the quorum then changes only for trials, and trials become rare.
class QuorumGuard {
 public:
  // If the quorum must go down, it goes to the largest quorum with at least this share of the best predicted rate.
  static constexpr double kAsGood = 0.96;
  static constexpr double kTooSlow = 0.94;  // a quorum goes down if its predicted rate is below this share of the best
  // The quorum may go up to the largest quorum with at least this share of the best predicted rate.
  static constexpr double kGoodEnough = 0.98;
  // An increase of the quorum stays if the new rate is at least this share of the rate before.
  static constexpr double kMayLose = 0.96;
  static constexpr double kMustGain = 1.045;  // a decrease of the quorum stays if the rate has grown by this factor
  static constexpr double kHopeless = 0.85;   // a trial of a quorum ends early below this share of the rate before it
  // Rates that are predicted for larger quorums may be too low by this factor.
  static constexpr double kMayHide = 0.6;
  static constexpr double kNewLoad = 1.25;  // the delay of a change ends if the predicted gain grows by this factor
  static constexpr double kNewRate = 1.3;   // the delay of a change ends if the measured rate changes by this factor
  static constexpr int kTrial = 3;          // how long a new quorum is on trial, in calls of Evaluate
  static constexpr int kLongestTrial = 8;   // how long a new quorum is on trial at most, if measured rates vary much

  enum class Why : unsigned char {
    kStart,   // the quorum is all ranks, as at the start
    kFaster,  // a smaller quorum was predicted to give more steps per second
    kAsFast,  // a larger quorum was predicted to give as many steps per second
    // A larger quorum is tried although less was predicted for it, because predictions from a small quorum may be too
    // low.
    kProbe,
    kTakenBack,  // the last change was undone, because the measured rate did not confirm it
  };

  // The steps of all ranks per second, with the standard error.
  struct Rate {
    double value = 0;
    double error = 0;
  };

  explicit QuorumGuard(std::size_t candidates) : candidates_(candidates) {}

  // Call this once in each period of rounds. `predicted`: the rate of steps for each candidate quorum. `measured`: the
  // rate since the last change, without the first rounds after it, or nothing. Returns true if the quorum has changed.
  bool Evaluate(const std::vector<double>& predicted, std::optional<Rate> measured);

  // Ends the trial of a quorum without a verdict, because another bucket is measured from now on. The quorum stays.
  void EndTrial() {
    trial_.reset();
    vote_.reset();
  }

  std::size_t at() const { return at_; }
  Why why() const { return why_; }
  bool on_trial() const { return trial_.has_value(); }

 private:
  enum Direction { kDown, kUp };
  // Delays further increases (or decreases) of the quorum, after one was taken back or the opposite change was kept.
  struct Hold {
    long until = 0;            // the period of rounds in which the delay of a change ends
    double promise = 0;        // the gain of speed that was predicted when the delay began, or for the undone change
    std::optional<Rate> rate;  // the rate that was measured when the delay began, or before the undone change
    int periods = 8;
  };
  struct Trial {
    std::size_t from = 0;
    std::optional<Rate> before;
    int periods = 0;
    double promise = 0;   // the gain of speed that was predicted when the trial began
    double expected = 0;  // the predicted rate of the new quorum, divided by that of the quorum before
  };
  enum class Verdict { kOpen, kKept, kFailed };

  Direction DirectionOf(const Trial& trial) const { return at_ > trial.from ? kDown : kUp; }
  static double Varies(const std::optional<Rate>& rate);
  static bool Differ(const std::optional<Rate>& one, const std::optional<Rate>& other);
  double Promise(Direction direction, const std::vector<double>& predicted) const;
  bool MayGo(Direction direction, const std::vector<double>& predicted, std::optional<Rate> measured);
  Verdict Judge(std::optional<Rate> measured) const;
  void Keep(const std::vector<double>& predicted, std::optional<Rate> measured);
  void TakeBack(std::optional<Rate> measured);
  std::optional<std::size_t> Wanted(const std::vector<double>& predicted) const;
  bool Probe(const std::vector<double>& predicted, std::optional<Rate> measured);
  bool Go(std::size_t to, Why why, const std::vector<double>& predicted, std::optional<Rate> measured);

  std::size_t candidates_;
  std::size_t at_ = 0;
  Why why_ = Why::kStart;
  long period_ = 0;
  std::optional<std::size_t> vote_;  // the candidate quorum that the last evaluation wanted
  std::optional<Trial> trial_;
  std::optional<Direction> last_kept_;
  std::array<Hold, 2> holds_;  // the delays of decreases of the quorum, and of increases
  // Predictions for larger quorums may be too low by this factor. The factor rises if a trial shows less error.
  double may_hide_ = kMayHide;
};

constexpr auto NamesOf(QuorumGuard::Why /*type*/) {
  return std::array{"start", "faster", "as_fast", "probe", "taken_back"};
}

}  // namespace horovod_partial
