#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "train/objectives/objective.h"

namespace lm {
namespace {

// Documents with their labels and scores, and what an objective makes of them.
struct Scored {
  std::vector<float> scores, labels;
  size_t width = 1, label_width = 0;

  std::vector<SampleScores> samples(std::vector<double>& gradients) const {
    gradients.assign(scores.size(), 0);
    std::vector<SampleScores> out;
    for (size_t d = 0; d < scores.size() / width; ++d) {
      out.push_back({.sample = static_cast<int32_t>(d),
                     .score = std::span(scores).subspan(d * width, width),
                     .label = std::span(labels).subspan(d * label_width, label_width),
                     .gradient = std::span(gradients).subspan(d * width, width)});
    }
    return out;
  }
  std::vector<double> columns(const Objective& objective) const {
    std::vector<double> gradients, out(objective.columns.size());
    objective.score(samples(gradients), out);
    return out;
  }
};

void expect_gradients(const Objective& objective, const Scored& data) {
  ASSERT_EQ(objective.columns.front(), "loss");
  std::vector<double> gradients, columns(objective.columns.size());
  objective.score(data.samples(gradients), columns);
  constexpr float kStep = 0x1p-8F;
  for (size_t i = 0; i < gradients.size(); ++i) {
    Scored more = data, less = data;
    more.scores[i] += kStep;
    less.scores[i] -= kStep;
    const double slope =
        (more.columns(objective).front() - less.columns(objective).front()) / (2 * double{kStep});
    EXPECT_NEAR(gradients[i], slope, 1e-4) << i;
  }
}

TEST(Objectives, GradientsOfScoresAreThoseOfTheLoss) {
  expect_gradients(objectives::single_label, {{0.5F, -1, 2, 1, 1.25F, -3}, {2, 0}, 3, 1});
  expect_gradients(objectives::multi_label, {{0.5F, -1, 2, 1, 1.25F, -3}, {1, 0, 1, 0, 0, 1}, 3, 3});
  expect_gradients(objectives::regression, {{0.5F, -1, 2, 1}, {1.5F, 0, -2, 0.25F}, 2, 2});
  expect_gradients(objectives::reward, {{0.5F, -1, 2, 2.5F}, {}, 1, 0});
}

// torch: cross_entropy, binary_cross_entropy_with_logits, mse_loss and -logsigmoid, each summed over texts.
TEST(Objectives, LossesAndAccuraciesAreTheFieldsOwn) {
  const Scored texts{{0.5F, -1, 2, 1, 1.25F, -3}, {2, 0}, 3, 1};
  const std::vector<double> single = texts.columns(objectives::single_label);
  const double first = std::log(std::exp(0.5) + std::exp(-1) + std::exp(2)) - 2,
               second = std::log(std::exp(1) + std::exp(1.25) + std::exp(-3)) - 1;
  EXPECT_NEAR(single[0], first + second, 1e-9);
  EXPECT_EQ(single[1], 1);  // the second text's largest score is the class beside its own
  const std::vector<double> any = Scored{{0.5F, -1}, {1, 0}, 2, 2}.columns(objectives::multi_label);
  EXPECT_NEAR(any[0], (std::log1p(std::exp(-0.5)) + std::log1p(std::exp(-1.0))) / 2, 1e-9);
  EXPECT_EQ(any[1], 1);
  EXPECT_NEAR((Scored{{0.5F, -1}, {1.5F, 0}, 2, 2}.columns(objectives::regression)[0]), 1, 1e-9);
  const std::vector<double> pairs = Scored{{2, 0.5F, -1, 1}, {}, 1, 0}.columns(objectives::reward);
  EXPECT_NEAR(pairs[0], std::log1p(std::exp(-1.5)) + std::log1p(std::exp(2.0)), 1e-9);
  EXPECT_EQ(pairs[1], 1);
  EXPECT_NEAR(pairs[2], -0.5, 1e-9);
  EXPECT_NEAR((Scored{{-500, 500}, {}, 1, 0}.columns(objectives::reward)[0]), 1000, 1e-9);
}

TEST(Objectives, MacroF1IsTheMeanOverTheClassesThatOccur) {
  std::vector<double> ignored;
  // Classes 0 and 2 of four: truth 0, 0, 2; chosen 0, 2, 2.
  const Scored texts{{2, 1, 0, 0, 0, 0, 1, 0, 0, 0, 3, 0}, {0, 0, 2}, 4, 1};
  EXPECT_NEAR(objectives::single_label.whole(texts.samples(ignored)).front().second, 2.0 / 3, 1e-12);
  // Of several labels each counts: the second is right, the first is never there.
  const Scored marks{{-1, 1, -1, 1}, {0, 1, 0, 1}, 2, 2};
  EXPECT_NEAR(objectives::multi_label.whole(marks.samples(ignored)).front().second, 0.5, 1e-12);
}

// A document without a target has neither scores nor gradients.
TEST(Objectives, ScoresBelongToTheDocumentsWithATarget) {
  const Batch batch{.token = {1, 2, 3, 4},
                    .position = {0, 1, 0, 0},
                    .target = {-1, 0, -1, 0},
                    .sample = {5, 5, 6, 7},
                    .document_start = {0, 2, 3, 4},
                    .label = {1, 2, 3}};
  const std::vector<float> scores{10, 20, 30, 40};
  std::vector<double> gradients(4);
  const std::vector<SampleScores> found = scores_by_sample(batch, scores, gradients, 2);
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[1].sample, 7);
  EXPECT_EQ(found[1].score.front(), 30);
  EXPECT_EQ(found[1].label.front(), 3);
  found[1].gradient[1] = 1;
  EXPECT_EQ(gradients[3], 1);
}

}  // namespace
}  // namespace lm
