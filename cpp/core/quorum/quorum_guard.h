// Chooses one of a few quorums, from predicted rates and from the measured one.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <vector>

namespace horovod_partial {

// It is asked once in each period of rounds. Candidate 0 is all ranks; higher numbers are smaller quorums. A change is
// on trial: it stays if the measured rate confirms it, and is taken back otherwise. A change upwards, towards all
// ranks, may cost a little. A change downwards must gain more than that, so no rates can confirm both. Under a constant
// load changes go on only as trials, which become rare.
class QuorumGuard {
 public:
  // share of the best predicted rate; the largest quorum that reaches it is wanted
  static constexpr double kAsGood = 0.96;
  static constexpr double kTooSlow = 0.94;     // below this predicted share, the quorum goes down
  static constexpr double kGoodEnough = 0.98;  // from this predicted share on, the quorum may go up
  // a change upwards stays if the rate is at least this much of the rate before
  static constexpr double kMayLose = 0.96;
  static constexpr double kMustGain = 1.045;  // the same for a change downwards
  static constexpr double kHopeless = 0.85;   // below this, a change is taken back before its trial is over
  static constexpr double kMayHide = 0.6;     // predictions for larger quorums may be too low by this factor
  static constexpr double kNewLoad = 1.25;  // a prediction this much better than the one that failed may be tried again
  static constexpr double kNewRate = 1.3;   // so may all predictions, if the rate has changed this much
  static constexpr int kTrial = 3;          // periods
  static constexpr int kLongestTrial = 8;   // periods, if the rates vary too much

  enum class Why : unsigned char {
    kStart,      // all ranks, at the start
    kFaster,     // a smaller quorum was predicted to give more steps
    kAsFast,     // a larger quorum was predicted to give as many
    kProbe,      // a larger quorum was predicted to give less; replays of a smaller one cannot tell, so it is tried
    kTakenBack,  // the measured rate did not confirm the change
  };

  // Steps of all ranks per second, and the standard error.
  struct Rate {
    double value = 0;
    double error = 0;
  };

  explicit QuorumGuard(std::size_t candidates) : candidates_(candidates) {}

  // `predicted`: rates by candidate. `measured`: the rate since the last change, without the first rounds after it;
  // none if there was nothing to measure. Returns true if at() has changed.
  bool Evaluate(const std::vector<double>& predicted, std::optional<Rate> measured);

  // Earlier measurements do not count any more, for example if another training begins. A change on trial stays.
  void EndTrial() {
    trial_.reset();
    vote_.reset();
  }

  std::size_t at() const { return at_; }
  Why why() const { return why_; }
  bool on_trial() const { return trial_.has_value(); }

 private:
  enum Direction { kDown, kUp };
  // Holds changes in one direction back, after one was not confirmed, or one in the other direction was.
  struct Hold {
    long until = 0;            // the period in which the hold ends
    double promise = 0;        // what was predicted then, relative to the present quorum
    std::optional<Rate> rate;  // what was measured at the present quorum
    int periods = 8;
  };
  struct Trial {
    std::size_t from = 0;
    std::optional<Rate> before;
    int periods = 0;
    double promise = 0;   // promise of the direction
    double expected = 0;  // the predicted rate, relative to that of `from`
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
  std::optional<std::size_t> vote_;  // the candidate that the last evaluation wanted
  std::optional<Trial> trial_;
  std::optional<Direction> last_kept_;
  std::array<Hold, 2> holds_;   // by direction
  double may_hide_ = kMayHide;  // raised when a probe has shown how good predictions are
};

constexpr auto NamesOf(QuorumGuard::Why /*type*/) {
  return std::array{"start", "faster", "as_fast", "probe", "taken_back"};
}

}  // namespace horovod_partial
