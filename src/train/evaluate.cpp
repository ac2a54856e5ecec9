#include "train/evaluate.h"

#include <fmt/format.h>
#include <algorithm>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "train/objectives/objective.h"

namespace lm {
namespace {

constexpr int64_t kDouble = sizeof(double);

// Adds the nll of each target to its document's sum.
void add_to_documents(const Batch& batch, const std::vector<float>& losses, double* sums) {
  for (const SampleRows& rows : rows_by_sample(batch, losses)) {
    for (const float nll : rows.nll) *sums += static_cast<double>(nll);
    ++sums;
  }
}

// Sums of weight * nll over the targets: of each batch, and of each document of a set of choices. Of a head
// of scores each document's scores.
struct Sums {
  std::vector<double> batches, documents = {};
  std::vector<int64_t> first = {};  // per batch its first document; at the end their number
};

std::optional<Sums> sums_of(Rank& rank, const EvalBatches& set, const std::function<bool()>& stopped) {
  Group& group = rank.group();
  const std::vector<Batch>& batches = set.batches;
  const auto count = std::ssize(batches);
  const auto first = [&](int64_t r) { return count * r / group.ranks(); };
  const bool choices = !set.groups.empty();
  const int64_t width = rank.scores() > 0 ? rank.scores() : choices ? 1 : 0;  // numbers of a document
  Sums sums{.batches = std::vector<double>(batches.size()), .first = {0}};
  for (const Batch& batch : batches) sums.first.push_back(sums.first.back() + batch.documents());
  sums.documents.resize(static_cast<size_t>(sums.first.back() * width));
  std::vector<float> losses;
  rank.step().flush();  // by every rank, even one without a batch
  // Every rank runs the same number of forward passes; one without batches left repeats a batch.
  for (int64_t i = first(group.rank()), round = 0; round < ceil_div(count, group.ranks()); ++round, ++i) {
    if (stopped()) return std::nullopt;
    const Batch& batch = batches[static_cast<size_t>(std::min(i, count - 1))];
    const double sum = rank.step().evaluate(batch, width > 0 ? &losses : nullptr);
    if (i >= first(group.rank() + 1)) continue;
    sums.batches[static_cast<size_t>(i)] = sum;
    double* const documents = sums.documents.data() + sums.first[static_cast<size_t>(i)] * width;
    if (rank.scores() > 0) {
      std::ranges::copy(losses, documents);
    } else if (choices) {
      add_to_documents(batch, losses, documents);
    }
  }
  const auto share = [&](std::vector<double>& values, const auto& begin) {
    std::vector<ByteRange> shards;
    for (int r = 0; r < group.ranks(); ++r)
      shards.push_back({begin(r) * kDouble, (begin(r + 1) - begin(r)) * kDouble});
    group.share("evaluation", reinterpret_cast<std::byte*>(values.data()), shards);
  };
  share(sums.batches, first);
  if (width > 0)
    share(sums.documents, [&](int64_t r) { return sums.first[static_cast<size_t>(first(r))] * width; });
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
  double nll = 0;
  std::vector<double> log_likelihoods(right.size());
  auto sum = sums.documents.begin();
  for (const Batch& batch : set.batches) {
    for (size_t d = 0; d + 1 < batch.document_start.size(); ++d, ++sum) {
      const auto begin = batch.target.begin() + batch.document_start[d],
                 end = batch.target.begin() + batch.document_start[d + 1];
      const auto ending = static_cast<size_t>(batch.sample[static_cast<size_t>(batch.document_start[d])]);
      log_likelihoods.at(ending) = -*sum;
      if (right[ending] == 0) continue;
      nll += *sum;
      result.target_tokens += std::count_if(begin, end, [](int32_t target) { return target >= 0; });
    }
  }
  result.loss = result.target_tokens > 0 ? nll / static_cast<double>(result.target_tokens) : 0.0;
  result.choices = score_choices(set.groups, std::move(log_likelihoods));
  return result;
}

EvalResult score_documents(const Rank& rank, const EvalBatches& set, const Sums& sums) {
  const Objective& objective = rank.objective();
  const auto width = static_cast<size_t>(rank.scores());
  const std::vector<float> scores(sums.documents.begin(), sums.documents.end());
  std::vector<double> gradients(scores.size()), columns(objective.columns.size());
  std::vector<SampleScores> samples;
  EvalResult result{.scored = true};
  for (size_t b = 0; b < set.batches.size(); ++b) {
    const size_t first = static_cast<size_t>(sums.first[b]) * width,
                 count = static_cast<size_t>(sums.first[b + 1]) * width - first;
    const auto here = scores_by_sample(set.batches[b], std::span(scores).subspan(first, count),
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
    const std::string name(objective.columns[c]);
    name == "loss" ? static_cast<void>(result.loss = value)
                   : static_cast<void>(result.columns.emplace_back(name, value));
  }
  if (objective.whole == nullptr) return result;
  for (const auto& figure : objective.whole(samples)) result.columns.push_back(figure);
  return result;
}

}  // namespace

std::string describe_scored(const EvalResult& result) {
  std::string out = fmt::format("{:.4f} over {} examples", result.loss, result.target_tokens);
  for (const auto& [name, value] : result.columns) out += fmt::format(", {} {:.4f}", name, value);
  return out;
}

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
  double nll = 0, weight = 0;
  for (const double sum : sums->batches) nll += sum;
  for (const Batch& batch : set.batches) {
    for (size_t t = 0; t < batch.target.size(); ++t) {
      if (batch.target[t] < 0) continue;
      ++result.target_tokens;
      weight += batch.weight.empty() ? 1.0 : static_cast<double>(batch.weight[t]);
    }
  }
  result.loss = weight > 0 ? nll / weight : 0.0;
  return result;
}

}  // namespace lm
