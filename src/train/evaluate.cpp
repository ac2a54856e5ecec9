#include "train/evaluate.h"

#include <algorithm>

#include "base/bytes.h"

namespace lm {
namespace {

constexpr int64_t kDouble = sizeof(double);

}  // namespace

EvalResult evaluate(Rank& rank, const std::vector<Batch>& batches) {
  return *evaluate_unless(rank, batches, [] { return false; });
}

std::optional<EvalResult> evaluate_unless(Rank& rank, const std::vector<Batch>& batches,
                                          const std::function<bool()>& stopped) {
  Group& group = rank.group();
  const auto count = std::ssize(batches);
  const auto first = [&](int64_t r) { return count * r / group.ranks(); };
  rank.step().flush();  // by every rank, even one without a batch
  std::vector<double> sums(batches.size());
  // Every rank runs the same number of forward passes; one without batches left repeats a batch.
  for (int64_t i = first(group.rank()), round = 0; round < ceil_div(count, group.ranks()); ++round, ++i) {
    if (stopped()) return std::nullopt;
    const double sum = rank.step().evaluate(batches[static_cast<size_t>(std::min(i, count - 1))]);
    if (i < first(group.rank() + 1)) sums[static_cast<size_t>(i)] = sum;
  }
  std::vector<ByteRange> shards;
  for (int r = 0; r < group.ranks(); ++r)
    shards.push_back({first(r) * kDouble, (first(r + 1) - first(r)) * kDouble});
  group.share("evaluation", reinterpret_cast<std::byte*>(sums.data()), shards);
  EvalResult result;
  double nll = 0, weight = 0;
  for (const double sum : sums) nll += sum;
  for (const Batch& batch : batches) {
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
