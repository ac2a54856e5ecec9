#include "launcher/rank/checkpoint_weights.h"

#include <utility>

#include "checkpoint/trained_values.h"
#include "launcher/rank/run_files.h"

namespace lm {
namespace {

ExportFiles files_of(const Job& job, CheckpointReader& reader, DType stored, Merge merge) {
  // An adapter is exported from its masters, which are more precise than its working weights.
  const bool masters = job.model.adapter.has_value();
  const auto read = [&reader, masters](size_t block, int64_t first, int64_t elements, float* out) {
    TrainedValues(reader, masters).read(static_cast<int64_t>(block), first, elements, out);
  };
  return {.spec = job.model.spec,
          .layout = job.model.layout,
          .model = frozen_source(job),
          .seed = job.config.run.seed,
          .adapter = "",
          .trained = read,
          .threads = job.plan.numerics.threads,
          .merge = std::move(merge),
          .quantised_from = stored};
}

}  // namespace

CheckpointWeights::CheckpointWeights(const Job& job, const std::string& checkpoint, DType stored, Merge merge)
    : reader_(checkpoint, job.plan.numerics.threads),
      source_(files_of(job, reader_, stored, std::move(merge))) {}

WeightSource CheckpointWeights::source() {
  return
      [this](size_t block, const TensorPlace& place, int64_t row) { return source_.view(block, place, row); };
}

}  // namespace lm
