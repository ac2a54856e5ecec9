#include "plan/generation.h"

#include <algorithm>

#include "model/key_value_cache.h"

namespace lm {
namespace {

bool scores_answers(const PlanInput& in) {
  const bool evaluates = in.trains() || in.purpose == PlanPurpose::kEvaluate;
  return evaluates && !in.config.eval.generate.data.empty();
}

}  // namespace

int64_t cache_positions(const PlanInput& in) {
  if (in.purpose == PlanPurpose::kGenerate) return in.config.data.max_length;
  const bool samples = in.trains() && !in.config.train.sample_prompts.empty();
  const int64_t before = in.adapter == nullptr ? 0 : in.adapter->virtual_tokens;
  return samples || scores_answers(in) ? std::min(in.config.data.max_length, kSamplePositions + before) : 0;
}

int64_t cache_texts(const PlanInput& in, const NumericsPlan& numerics) {
  if (in.purpose == PlanPurpose::kGenerate) return numerics.micro_batch;
  // A batch of texts has a token, a document and three numbers of attention for each.
  return scores_answers(in) ? std::clamp<int64_t>(micro_tokens(in, numerics) / 4, 1, kScoredTexts) : 1;
}

void add_generation(const PlanInput& in, const NumericsPlan& numerics, const PlanSizes& sizes,
                    ClassTable& table) {
  const DType dtype = numerics.dtype;
  const int64_t texts = sizes.cache_texts;
  if (sizes.cache_positions > 0)
    table.device("key-value cache", texts * KeyValueCache::bytes(in.spec, sizes.cache_positions, dtype),
                 fmt::format("{}{} tokens, {}", texts > 1 ? fmt::format("{} texts of ", texts) : "",
                             sizes.cache_positions, dtype_name(dtype)));
  if (texts == 1) return;
  const int64_t logits = generated_logit_rows(texts) * in.spec.vocab, size = size_of(dtype);
  table.device("logits", logits * size, "of the texts together");
  table.host("logits", logits * (size + 4), "the same, and in fp32");
}

}  // namespace lm
