#include "data/choices.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"

namespace lm {
namespace {

// By sum the short ending, per character the long one.
TEST(Choices, AnEndingIsChosenBySumAndPerCharacter) {
  const ChoiceGroup group{.right = 1, .characters = {2, 20, 4}};
  const std::vector<double> sums = {-3, -12, -5};  // -1.5, -0.6, -1.25 per character
  const Chosen chosen = choose(group, sums);
  EXPECT_EQ(chosen.by_sum, 0);
  EXPECT_EQ(chosen.by_character, 1);
}

TEST(Choices, OfEqualEndingsTheFirstIsChosen) {
  const ChoiceGroup group{.right = 0, .characters = {3, 6, 3}};
  const Chosen chosen = choose(group, std::vector<double>{-4, -8, -4});
  EXPECT_EQ(chosen.by_sum, 0);
  EXPECT_EQ(chosen.by_character, 0);
}

TEST(Choices, AccuracyIsTheShareOfRowsWhoseRightEndingIsChosen) {
  const std::vector<ChoiceGroup> groups = {{.right = 0, .characters = {1, 1}},
                                           {.right = 2, .characters = {1, 9, 3}},
                                           {.right = 1, .characters = {2, 8}},
                                           {.right = 0, .characters = {4, 4}}};
  const ChoiceScores scores = score_choices(groups, {-1, -2, -7, -8, -3, -5, -6, -2, -1});
  // By sum: 0, 2, 0, 1. Per character: 0, 1, 1, 1.
  EXPECT_EQ(scores.accuracy, 0.5);
  EXPECT_EQ(scores.accuracy_norm, 0.5);
  EXPECT_EQ(scores.rows, 4);
  EXPECT_EQ(describe(scores), ", accuracy 0.5000, accuracy_norm 0.5000 over 4 rows");
  EXPECT_EQ(named_scores(scores), (NamedScores{{"accuracy", 0.5}, {"accuracy_norm", 0.5}}));
}

TEST(Choices, TakesALogLikelihoodForEachEnding) {
  const std::vector<ChoiceGroup> groups = {{.right = 0, .characters = {1, 1}}};
  EXPECT_THROW(score_choices(groups, {-1}), Error);
  EXPECT_THROW(score_choices(groups, {-1, -2, -3}), Error);
}

}  // namespace
}  // namespace lm
