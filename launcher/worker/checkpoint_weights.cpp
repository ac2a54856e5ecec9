#include "launcher/worker/checkpoint_weights.h"

#include <algorithm>
#include <utility>

#include "checkpoint/trained_values.h"
#include "launcher/worker/run_files.h"

namespace lm {
namespace {

ExportFiles files_of(const Job& job, CheckpointReader& reader, DType stored, Merge merge) {
  // An adapter is exported from its masters, which are more precise than its working weights.
  // What is trained whole beside it is as the run itself writes it (export/export_source.h).
  const bool masters = job.model.adapter.has_value();
  const auto read = [&reader, &layout = job.model.layout, masters](size_t block, int64_t first,
                                                                   int64_t elements, float* out) {
    const auto b = static_cast<int64_t>(block);
    TrainedValues(reader, masters).read(b, first, elements, out);
    for (const TensorPlace& place : layout.blocks[block].tensors) {
      if (!masters || place.parameter.role != TrainableRole::kWhole) continue;
      const int64_t from = std::max(first, place.offset),
                    end = std::min(first + elements, place.offset + place.parameter.elements());
      if (from < end) TrainedValues(reader, false).read(b, from, end - from, out + (from - first));
    }
  };
  return {.spec = job.model.spec,
          .layout = job.model.layout,
          .model = frozen_source(job),
          .seed = job.config.run.seed,
          .adapter = "",
          .trained = read,
          .threads = job.plan.numerics.threads,
          .merge = std::move(merge),
          .quantized_from = stored};
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
