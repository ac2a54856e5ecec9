#include "data/choices.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"
#include "data/loader.h"
#include "memory_source.h"

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

// A long context loses its beginning, whatever data.too_long says of others.
TEST(Choices, EndingsAreEvaluatedWithTheEndOfTheirContext) {
  MemorySource train, eval;
  train.add({1, 2, 3});
  eval.add({1, 2, 3, 4, 5, 6}, {0, 0, 0, 0, 1, 1});
  eval.add({7, 8, 9}, {0, 0, 1});
  const LoaderOptions options = {.seed = 7,
                                 .max_length = 4,
                                 .too_long = TooLong::kDrop,
                                 .packing = false,
                                 .global_batch = 4,
                                 .micro_batch = 1,
                                 .vocab = 100000,
                                 .eval_fraction = 0.0,
                                 .rank = 0,
                                 .world = 1};
  const std::vector<ChoiceGroup> groups = {{.right = 1, .characters = {5, 6}}};
  const auto source = [&](const MemorySource& from) {
    return std::vector<EvalSource>{{.source = &from, .groups = groups}};
  };
  const Loader loader(train, source(eval), options);
  const EvalBatches set = loader.eval_sets().at(0);
  ASSERT_EQ(set.batches.size(), 2u);
  EXPECT_EQ(set.batches[0].token, (std::vector<int32_t>{3, 4, 5, 6}));
  EXPECT_EQ(set.batches[0].target, (std::vector<int32_t>{-1, 5, 6, -1}));
  EXPECT_EQ(set.batches[0].position, (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(set.batches[1].token, (std::vector<int32_t>{7, 8, 9}));
  EXPECT_EQ(set.batches[1].sample, (std::vector<int32_t>{1, 1, 1}));
  ASSERT_EQ(set.groups.size(), 1u);
  EXPECT_EQ(set.groups[0].right, 1);
  EXPECT_NE(
      loader.length_report().find("data: eval: 2 rows, 9 tokens, at data.max_length 4: 1 row whole, 1 cut"),
      std::string::npos)
      << loader.length_report();

  MemorySource longer;
  longer.add({1, 2, 3, 4, 5, 6}, {0, 0, 1, 1, 1, 1});
  longer.add({7, 8, 9}, {0, 0, 1});
  try {
    const Loader refused(train, source(longer), options);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInput);
    EXPECT_EQ(error.text().what, "1 of 2 endings are longer than data.max_length 4 allows");
  }
}

}  // namespace
}  // namespace lm
