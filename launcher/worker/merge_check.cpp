#include "launcher/worker/merge_check.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"

namespace lm {
namespace {

constexpr int32_t kTokens = 32;
// Relative to the largest logit. bf16 rounding changes weights by 2^-9; a matrix that was left out, or added
// twice, changes logits by more than any rounding.
constexpr double kMostFp32 = 1e-3, kMostBf16 = 0.1;

// Tokens from the whole vocabulary, the same each time.
Batch some_tokens(int64_t vocab) {
  Batch batch;
  for (int32_t i = 0; i < kTokens; ++i)
    batch.token.push_back(static_cast<int32_t>((int64_t{7919} * i + 13) % vocab));
  batch.position.resize(kTokens);
  std::iota(batch.position.begin(), batch.position.end(), 0);
  batch.target.assign(kTokens, -1);
  batch.sample.assign(kTokens, 0);
  batch.document_start = {0, kTokens};
  return batch;
}

std::vector<float> logits_of(Config config, const std::string& trained, const CommandLine& line) {
  config.data.max_length = kTokens;
  config.train.global_batch = 1;
  config.train.micro_batch = 1;
  const std::unique_ptr<Job> job = open_job(config, line, PlanPurpose::kGenerate);
  const std::unique_ptr<Rank> rank = make_rank(*job, false);
  load_rank(*job, *rank, trained);
  if (job->model.spec.scores()) {
    Batch text = some_tokens(job->model.spec.vocab);
    text.target.back() = 0;
    TargetResults results;
    rank->step().evaluate(text, &results);
    return results.scores;
  }
  std::vector<int32_t> rows(kTokens);
  std::iota(rows.begin(), rows.end(), 0);
  return rank->step().logits(some_tokens(job->model.spec.vocab), rows);
}

}  // namespace

MergeCheck check_merged(const Subject& subject, const std::string& merged, DType stored,
                        const CommandLine& line) {
  MergeCheck out;
  Config config = subject.config;
  // A checkpoint has its arrays in the run's own type.
  if (subject.checkpoint && stored == DType::kBF16) config.model.dtype = ModelDType::kBF16;
  if (subject.checkpoint && stored == DType::kF16) config.model.dtype = ModelDType::kF16;
  std::vector<float> apart, together;
  try {
    apart = logits_of(config, subject.trained, line);
    config.model.path = merged;
    config.model.init = ModelInit::kPretrained;
    config.model.quantize = Quantize::kNone;
    config.train.method = Method::kFull;
    config.lora.init.clear();
    together = logits_of(config, "", line);
  } catch (const Error& error) {
    if (error.code() != Exit::kDoesNotFit) throw;
    out.skipped = error.what();
    return out;
  }
  for (size_t i = 0; i < apart.size(); ++i) {
    const double difference = std::abs(static_cast<double>(apart[i]) - together[i]);
    if (!(difference <= out.difference)) out.difference = difference;  // keeps NaN
    out.largest = std::max(out.largest, std::abs(static_cast<double>(apart[i])));
  }
  const double most = (stored == DType::kF32 ? kMostFp32 : kMostBf16) * out.largest;
  if (out.difference <= most) return out;  // false for NaN
  const std::string text =
      fmt::format("the merged model's logits differ by {:.3g} from the adapter's, of at most {:.3g}",
                  out.difference, out.largest);
  throw Error(Exit::kIntegrity, {.area = "FILE-27",
                                 .what = text,
                                 .place = merged,
                                 .next = "do not use it; check the disk, and export again",
                                 .kept = "the adapter, as it was"});
}

}  // namespace lm
