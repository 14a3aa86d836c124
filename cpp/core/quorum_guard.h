// Which of a few quorums should hold, as far as predictions say, and what was measured allows?
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <vector>

namespace horovod_partial {

// Asked once in each period of rounds. Candidates are numbered from all ranks (0) downwards. A change is on trial: it
// stays if the measured rate bears it out, and is else taken back. Up, towards all ranks, it may cost a little; down it
// must gain, by more than what an upward change may cost: so no rates bear out both, and a constant load sees no end of
// changes only as trials, which become rare.
class QuorumGuard {
 public:
  static constexpr double kAsGood = 0.96;      // of the best predicted rate: the largest such quorum is wanted
  static constexpr double kTooSlow = 0.94;     // a quorum that predicts less is left downwards
  static constexpr double kGoodEnough = 0.98;  // one that predicts this is entered upwards
  static constexpr double kMayLose = 0.96;     // a change upwards stays if the rate is this much of the one before
  static constexpr double kMustGain = 1.045;   // a change downwards
  static constexpr double kHopeless = 0.85;    // any change ends after its first period below this
  static constexpr double kMayHide = 0.6;      // predictions for larger quorums may be too low, down to this
  static constexpr double kNewLoad = 1.25;     // a prediction so much better than the one that failed counts anew,
  static constexpr double kNewRate = 1.3;      // and all of them, where the rate has changed by so much
  static constexpr int kTrial = 3;             // periods
  static constexpr int kLongestTrial = 8;      // where the rates vary too much

  enum class Why : unsigned char {
    kStart,      // all ranks, at first
    kFaster,     // a smaller quorum promises more steps
    kAsFast,     // a larger quorum promises as many
    kProbe,      // a larger quorum promises less, which the replays of a smaller one cannot know
    kTakenBack,  // the rate did not bear the change out
  };

  // Steps of all ranks in a second, and the standard error of that.
  struct Rate {
    double value = 0;
    double error = 0;
  };

  explicit QuorumGuard(std::size_t candidates) : candidates_(candidates) {}

  // Predicted rates by candidate, and the measured one since the last change, without its transition; none where there
  // was nothing to measure. True if at() is another one now.
  bool Evaluate(const std::vector<double>& predicted, std::optional<Rate> measured);

  // What was measured is of no use any more, as of another training: what is on trial stays.
  void EndTrial() {
    trial_.reset();
    vote_.reset();
  }

  std::size_t at() const { return at_; }
  Why why() const { return why_; }
  bool on_trial() const { return trial_.has_value(); }

 private:
  enum Direction { kDown, kUp };
  // After a change in one direction was not borne out, or one in the other direction was.
  struct Hold {
    long until = 0;            // period
    double promise = 0;        // what was predicted then, beside the present
    std::optional<Rate> rate;  // what was measured at the present quorum
    int periods = 8;
  };
  struct Trial {
    std::size_t from = 0;
    std::optional<Rate> before;
    int periods = 0;
    double promise = 0;   // of the direction
    double expected = 0;  // the predicted rate beside that of `from`
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
  std::optional<std::size_t> vote_;  // of the evaluation before
  std::optional<Trial> trial_;
  std::optional<Direction> last_kept_;
  std::array<Hold, 2> holds_;   // by direction
  double may_hide_ = kMayHide;  // higher when a probe has shown how right predictions are
};

constexpr auto NamesOf(QuorumGuard::Why /*type*/) {
  return std::array{"start", "faster", "as_fast", "probe", "taken_back"};
}

}  // namespace horovod_partial
