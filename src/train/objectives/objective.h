// What a run minimises, as a value: a function from the nll of rows, grouped by sample, to the rows' weights
// in the loss and to columns of the metrics; or from documents' scores to their gradients. Host memory; the
// step copies both ways (train/step_objective.cpp). Each objective has a file in this folder and a line in
// table.inc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/batch.h"

namespace lm {

// The rows with a target of one document of a micro-batch, in order.
struct SampleRows {
  int32_t sample = 0;  // index of the example in the data set
  std::span<const float> nll;
  std::span<float> weight;  // derivative of the sum of losses by each nll; may be negative
};

// One document's last token under a head of scores.
struct SampleScores {
  int32_t sample = 0;
  std::span<const float> score;  // [labels]
  std::span<const float> label;  // the class; or a number for each score (Batch::label)
  std::span<double> gradient;    // derivative of the sum of losses by each score; 0 at first
};

using NamedColumns = std::vector<std::pair<std::string, double>>;

struct Objective {
  // Sums that a step adds up over its micro-batches and ranks, and divides as it divides the sum of losses.
  // One named "loss" takes the place of the sum of weight * nll with the data's weights.
  std::span<const std::string_view> columns = {};
  // Called for each micro-batch: changes the weights, which are the data's at first, and adds to the columns.
  // Null: the data's weights stay. They are known before the pass, and the head fuses its phases.
  void (*weigh)(std::span<const SampleRows> samples, std::span<double> columns) = nullptr;
  // In its place of a head of scores: sets the gradients of a micro-batch's documents, and adds to the
  // columns.
  void (*score)(std::span<const SampleScores> samples, std::span<double> columns) = nullptr;
  // Figures of a whole evaluation set that are no sums; null: none.
  NamedColumns (*whole)(std::span<const SampleScores> samples) = nullptr;
};

namespace objectives {
#define LM_OBJECTIVE(name) extern const Objective name;
#include "train/objectives/table.inc"
#undef LM_OBJECTIVE
}  // namespace objectives

// The data's weight of each target, in the order of the batch.
std::vector<float> target_weights(const Batch& batch);
// `nll` and `weight` have a number for each target, in the order of the batch; `weight` may be empty.
std::vector<SampleRows> rows_by_sample(const Batch& batch, std::span<const float> nll,
                                       std::span<float> weight = {});
// `scores` and `gradients` have [labels] numbers for each document with a target, in the order of the batch.
std::vector<SampleScores> scores_by_sample(const Batch& batch, std::span<const float> scores,
                                           std::span<double> gradients, size_t labels);
// Macro F1: the mean over the classes, of each 2 right / (predicted + true). `counts`: of each class these
// three numbers. Classes of which all are 0 count as 0, or not at all.
struct ClassCounts {
  int64_t right = 0, predicted = 0, truth = 0;
};
double macro_f1(std::span<const ClassCounts> counts, bool empty_classes);

}  // namespace lm
