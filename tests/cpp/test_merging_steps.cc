#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <vector>

#include "core/merging/merging_steps.h"

namespace horovod_partial {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

constexpr std::size_t kWindow = 2;

// Gradients 0, 1 and 2 of 10, 20 and 30 elements; first {2, 1} and {0}.
MergingSteps::Declaration Declared() { return {"g", {10, 20, 30}, {{2, 1}, {0}}, 3, kWindow}; }

// A step that begins at a moment, and when it is over whether a plan is due.
bool Step(MergingSteps& steps, double begin) {
  steps.RecordGradient(2, 30, begin);
  steps.RecordGradient(1, 20, begin + 0.1);
  steps.RecordGradient(0, 10, begin + 0.2);
  return steps.StepEnded(begin + 0.5);
}

TEST(MergingStepsTest, TellsAGradientItsPlace) {
  MergingSteps steps(Declared());
  const MergingSteps::Place place = steps.RecordGradient(1, 20, 0);
  EXPECT_EQ(place.bucket, "g.0");
  EXPECT_EQ(place.position, 1u);
  EXPECT_THAT(place.elements, ElementsAre(30, 20));
  EXPECT_EQ(steps.RecordGradient(0, 10, 0).bucket, "g.1");
}

TEST(MergingStepsTest, RefusesGradientsThatItDoesNotKnow) {
  MergingSteps steps(Declared());
  EXPECT_THROW(steps.RecordGradient(3, 10, 0), std::invalid_argument);
  EXPECT_THROW(steps.RecordGradient(-1, 10, 0), std::invalid_argument);
  EXPECT_THROW(steps.RecordGradient(0, 11, 0), std::invalid_argument) << "another size";
}

TEST(MergingStepsTest, APlanIsDueOnceAfterSoManySteps) {
  MergingSteps steps(Declared());
  std::vector<bool> due;
  for (int i = 0; i < 5; ++i) due.push_back(Step(steps, i));
  EXPECT_THAT(due, ElementsAre(false, false, true, false, false));
}

TEST(MergingStepsTest, MeasuresTheFirstAndTheLastStepsUnderAPlan) {
  MergingSteps steps(Declared());
  steps.Plan(std::nullopt, 10);
  std::vector<bool> measured;
  for (int i = 0; i < 11; ++i) {
    measured.push_back(steps.Measures());
    Step(steps, i);
  }
  EXPECT_THAT(measured, ElementsAre(true, true, true, false, false, false, false, true, true, true, false))
      << "one step more than the window: the measured ones begin in it";
}

TEST(MergingStepsTest, EveryPlanHasBucketsOfItsOwn) {
  MergingSteps steps(Declared());
  EXPECT_EQ(steps.plans(), 0);
  steps.Plan(MergingSteps::Messages{{0}, {1}, {2}}, 1);
  EXPECT_EQ(steps.plans(), 1);
  EXPECT_EQ(steps.RecordGradient(2, 30, 0).bucket, "g.plan1.2");
  steps.Plan(std::nullopt, 1);
  EXPECT_EQ(steps.RecordGradient(2, 30, 0).bucket, "g.plan1.2") << "the messages stay";
  steps.Plan(MergingSteps::Messages{{2, 1, 0}}, 1);
  EXPECT_EQ(steps.RecordGradient(2, 30, 0).bucket, "g.plan3.0");
}

TEST(MergingStepsTest, APlanSaysWhenTheNextIsDue) {
  MergingSteps steps(Declared());
  Step(steps, 0);
  steps.Plan(std::nullopt, 2);
  EXPECT_FALSE(Step(steps, 1));
  EXPECT_TRUE(Step(steps, 2));
  steps.Plan(std::nullopt, std::nullopt);
  for (int i = 3; i < 10; ++i) EXPECT_FALSE(Step(steps, i));
}

TEST(MergingStepsTest, RefusesPlansThatDoNotHaveEachGradientOnce) {
  MergingSteps steps(Declared());
  using Messages = MergingSteps::Messages;
  for (const Messages& messages : {Messages{{0, 1}}, Messages{{0, 1, 2, 2}}, Messages{{0, 1, 3}}, Messages{{0, 1, -1}}})
    EXPECT_THROW(steps.Plan(messages, 1), std::invalid_argument);
  EXPECT_EQ(steps.plans(), 0);
  EXPECT_EQ(steps.RecordGradient(0, 10, 0).bucket, "g.1") << "what was in use stays";
  MergingSteps::Declaration wrong = Declared();
  wrong.messages = {{0}};
  EXPECT_THROW(MergingSteps{wrong}, std::invalid_argument);
}

TEST(MergingStepsTest, KeepsTheFirstAndTheLastTimes) {
  MergingSteps steps(Declared());
  for (int i = 0; i < 6; ++i) Step(steps, i);
  ASSERT_THAT(steps.first_rows(), SizeIs(kWindow + 1));
  ASSERT_THAT(steps.last_rows(), SizeIs(kWindow + 1));
  EXPECT_THAT(steps.first_rows().front(), ElementsAre(0.2, 0.1, 0.0, 0.5));
  EXPECT_THAT(steps.last_rows().front(), ElementsAre(3.2, 3.1, 3.0, 3.5));
  EXPECT_THAT(steps.last_rows().back(), ElementsAre(5.2, 5.1, 5.0, 5.5));
  steps.Plan(std::nullopt, 1);
  EXPECT_THAT(steps.first_rows(), SizeIs(0)) << "times of another plan";
  EXPECT_THAT(steps.last_rows(), SizeIs(0));
}

TEST(MergingStepsTest, AGradientThatDoesNotComeHasNoTime) {
  MergingSteps steps(Declared());
  Step(steps, 0);
  steps.RecordGradient(0, 10, 1.0);
  steps.StepEnded(2.0);
  EXPECT_TRUE(std::isnan(steps.last_rows().back()[1])) << "not that of the step before";
  EXPECT_EQ(steps.last_rows().back()[0], 1.0);
}

TEST(MergingStepsTest, GradientsMayBeThereAtTheSameMoment) {
  MergingSteps steps(Declared());
  steps.RecordAllGradients(7.0);
  steps.StepEnded(8.0);
  EXPECT_THAT(steps.last_rows().back(), ElementsAre(7.0, 7.0, 7.0, 8.0));
}

TEST(MergingStepsTest, ARestartForgetsPlansAndSteps) {
  MergingSteps steps(Declared());
  Step(steps, 0);
  steps.Plan(MergingSteps::Messages{{0, 1, 2}}, 100);
  Step(steps, 1);
  steps.Restart();
  EXPECT_EQ(steps.plans(), 0);
  EXPECT_EQ(steps.RecordGradient(0, 10, 0).bucket, "g.1");
  EXPECT_THAT(steps.last_rows(), SizeIs(0));
  std::vector<bool> due;
  for (int i = 0; i < 5; ++i) due.push_back(Step(steps, i));
  EXPECT_THAT(due, ElementsAre(false, false, true, false, false));
}

}  // namespace
}  // namespace horovod_partial
