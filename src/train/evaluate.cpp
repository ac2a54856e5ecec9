#include "train/evaluate.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "train/objectives/objective.h"

namespace lm {
namespace {

// Adds what is known of each target to its document's sums.
void add_to_documents(const Batch& batch, const TargetResults& targets, LossSums* sums) {
  const auto add = [&](const std::vector<float>& values, double LossSums::*sum) {
    LossSums* document = sums;
    for (const SampleRows& rows : rows_by_sample(batch, values)) {
      for (const float value : rows.nll) document->*sum += static_cast<double>(value);
      ++document;
    }
  };
  add(targets.nll, &LossSums::nll);
  add(targets.correct, &LossSums::correct);
}

// Sums over the targets: of each batch, and of each document of a set of choices. Of a head of scores each
// document's scores.
struct Sums {
  std::vector<LossSums> batches, documents = {};
  std::vector<float> scores = {};
  std::vector<int64_t> first = {};  // per batch its first document; at the end their number
};

std::optional<Sums> sums_of(Rank& rank, const EvalBatches& set, const std::function<bool()>& stopped) {
  Group& group = rank.group();
  const std::vector<Batch>& batches = set.batches;
  const auto count = std::ssize(batches);
  const auto first = [&](int64_t r) { return count * r / group.ranks(); };
  const bool choices = !set.groups.empty();
  const int64_t width = rank.scores();
  Sums sums{.batches = std::vector<LossSums>(batches.size()), .first = {0}};
  for (const Batch& batch : batches) sums.first.push_back(sums.first.back() + batch.documents());
  if (choices) sums.documents.resize(static_cast<size_t>(sums.first.back()));
  sums.scores.resize(static_cast<size_t>(sums.first.back() * width));
  TargetResults targets;
  rank.step().flush();  // by every rank, even one without a batch
  // Every rank runs the same number of forward passes; one without batches left repeats a batch.
  for (int64_t i = first(group.rank()), round = 0; round < ceil_div(count, group.ranks()); ++round, ++i) {
    if (stopped()) return std::nullopt;
    const Batch& batch = batches[static_cast<size_t>(std::min(i, count - 1))];
    const LossSums sum = rank.step().evaluate(batch, choices || width > 0 ? &targets : nullptr);
    if (i >= first(group.rank() + 1)) continue;
    sums.batches[static_cast<size_t>(i)] = sum;
    const int64_t document = sums.first[static_cast<size_t>(i)];
    if (choices) add_to_documents(batch, targets, sums.documents.data() + document);
    if (width > 0) std::ranges::copy(targets.scores, sums.scores.begin() + document * width);
  }
  // `begin` gives the place of a rank's first value.
  const auto share = [&](auto& values, const auto& begin) {
    const auto bytes = static_cast<int64_t>(sizeof values.front());
    std::vector<ByteRange> shards;
    for (int r = 0; r < group.ranks(); ++r)
      shards.push_back({begin(r) * bytes, (begin(r + 1) - begin(r)) * bytes});
    group.all_gather("evaluation", reinterpret_cast<std::byte*>(values.data()), shards);
  };
  const auto document = [&](int64_t r) { return sums.first[static_cast<size_t>(first(r))]; };
  share(sums.batches, first);
  if (choices) share(sums.documents, document);
  if (width > 0) share(sums.scores, [&](int64_t r) { return document(r) * width; });
  return sums;
}

EvalResult score_endings(const EvalBatches& set, const Sums& sums) {
  std::vector<char> right;
  for (const ChoiceGroup& group : set.groups) {
    const size_t begin = right.size();
    right.resize(begin + group.characters.size());
    right[begin + static_cast<size_t>(group.right)] = 1;
  }
  EvalResult result;
  LossSums right_endings;
  std::vector<double> log_likelihoods(right.size());
  auto sum = sums.documents.begin();
  for (const Batch& batch : set.batches) {
    for (size_t d = 0; d + 1 < batch.document_start.size(); ++d, ++sum) {
      const auto begin = batch.target.begin() + batch.document_start[d],
                 end = batch.target.begin() + batch.document_start[d + 1];
      const auto ending = static_cast<size_t>(batch.sample[static_cast<size_t>(batch.document_start[d])]);
      log_likelihoods.at(ending) = -sum->nll;
      if (right[ending] == 0) continue;
      right_endings.nll += sum->nll;
      right_endings.correct += sum->correct;
      result.target_tokens += std::count_if(begin, end, [](int32_t target) { return target >= 0; });
    }
  }
  const auto tokens = static_cast<double>(result.target_tokens);
  result.loss = tokens > 0 ? right_endings.nll / tokens : 0.0;
  result.token_accuracy = tokens > 0 ? right_endings.correct / tokens : 0.0;
  result.choices = score_choices(set.groups, std::move(log_likelihoods));
  return result;
}

EvalResult score_documents(const Rank& rank, const EvalBatches& set, const Sums& sums) {
  const Objective& objective = rank.objective();
  const auto width = static_cast<size_t>(rank.scores());
  std::vector<double> gradients(sums.scores.size()), columns(objective.columns.size());
  std::vector<SampleScores> samples;
  EvalResult result{.scored = true};
  for (size_t b = 0; b < set.batches.size(); ++b) {
    const size_t first = static_cast<size_t>(sums.first[b]) * width,
                 count = static_cast<size_t>(sums.first[b + 1]) * width - first;
    const auto here = scores_by_sample(set.batches[b], std::span(sums.scores).subspan(first, count),
                                       std::span(gradients).subspan(first, count), width);
    // The documents of a pair are one example.
    for (size_t d = 0; d < here.size(); ++d)
      result.target_tokens += d == 0 || here[d].sample != here[d - 1].sample ? 1 : 0;
    samples.insert(samples.end(), here.begin(), here.end());
  }
  objective.score(samples, columns);
  for (size_t c = 0; c < columns.size(); ++c) {
    const double value =
        result.target_tokens > 0 ? columns[c] / static_cast<double>(result.target_tokens) : 0;
    if (objective.columns[c] == "loss")
      result.loss = value;
    else
      result.columns.emplace_back(objective.columns[c], value);
  }
  if (objective.whole == nullptr) return result;
  for (const auto& figure : objective.whole(samples)) result.columns.push_back(figure);
  return result;
}

}  // namespace

EvalResult evaluate(Rank& rank, const EvalBatches& set) {
  return *evaluate_unless(rank, set, [] { return false; });
}

std::optional<EvalResult> evaluate_unless(Rank& rank, const EvalBatches& set,
                                          const std::function<bool()>& stopped) {
  const std::optional<Sums> sums = sums_of(rank, set, stopped);
  if (!sums) return std::nullopt;
  if (rank.scores() > 0) return score_documents(rank, set, *sums);
  if (!set.groups.empty()) return score_endings(set, *sums);
  EvalResult result;
  double nll = 0, correct = 0, weight = 0;
  for (const LossSums& sum : sums->batches) nll += sum.nll, correct += sum.correct;
  for (const Batch& batch : set.batches) {
    for (size_t t = 0; t < batch.target.size(); ++t) {
      if (batch.target[t] < 0) continue;
      ++result.target_tokens;
      weight += batch.weight.empty() ? 1.0 : static_cast<double>(batch.weight[t]);
    }
  }
  result.loss = weight > 0 ? nll / weight : 0.0;
  if (result.target_tokens > 0) result.token_accuracy = correct / static_cast<double>(result.target_tokens);
  return result;
}

}  // namespace lm
