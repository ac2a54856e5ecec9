#include "model/virtual_tokens.h"

#include <algorithm>

namespace lm {
namespace {

// The virtual tokens that a document has in the batch: all of them, or, of a text that is continued, those
// that its cache does not have.
struct VirtualRows {
  int64_t row = 0;    // of the batch
  int64_t first = 0;  // of the virtual tokens
  int64_t count = 0;
};

VirtualRows virtual_rows(const DeviceBatch& batch, int64_t document, int64_t all) {
  // A dry run counts documents without their lengths.
  if (batch.document_start == nullptr) return {0, 0, std::min(all, batch.tokens)};
  const int32_t* const start = batch.document_start + document;
  const int64_t past = batch.continues() ? batch.caches[static_cast<size_t>(document)]->tokens() : 0;
  return {start[0], past, std::clamp<int64_t>(all - past, 0, start[1] - start[0])};
}

}  // namespace

void put_virtual_rows(const Context& context, const Param& values, const DeviceBatch& batch, const View& x,
                      float factor) {
  if (!values.weight.defined()) return;
  const ArenaFrame frame(context.arena);
  const View stored = context.tensor(values.weight.rows, values.weight.columns, x.dtype);
  accumulate(context, stored, values.weight, true);
  if (factor != 1) context.kernels.scale({.x = stored, .out = stored, .factor = factor}, context.stream);
  for (int64_t d = 0; d < batch.document_count; ++d) {
    const VirtualRows at = virtual_rows(batch, d, stored.rows);
    if (at.count == 0) continue;
    context.kernels.copy_rows(
        {.from = stored.row_range(at.first, at.count), .to = x.row_range(at.row, at.count)}, context.stream);
  }
}

bool has_virtual_rows(const DeviceBatch& batch, int64_t all) {
  for (int64_t d = 0; d < batch.document_count; ++d)
    if (virtual_rows(batch, d, all).count > 0) return true;
  return false;
}

View take_virtual_rows(const Context& context, int64_t all, const DeviceBatch& batch, const View& dx,
                       float factor) {
  const View sum = context.tensor(all, dx.columns, DType::kF32);
  context.kernels.zero(sum, context.stream);
  const auto take = [&](const int32_t* start, int64_t first, int64_t documents) {
    context.kernels.take_first_rows({.x = dx.data,
                                     .start = start,
                                     .sums = sum.floats(),
                                     .first = first,
                                     .documents = documents,
                                     .rows = all,
                                     .width = dx.columns,
                                     .stride = dx.stride,
                                     .dtype = dx.dtype},
                                    context.stream);
  };
  // A GPU reads the starts where its attention does, of all documents or of a few runs of them.
  if (batch.runs.empty()) take(batch.document_start, 0, batch.document_count);
  for (const DocumentRun& run : batch.runs) take(run.start, run.first, run.count);
  if (factor != 1) context.kernels.scale({.x = sum, .out = sum, .factor = factor}, context.stream);
  return sum;
}

void take_virtual_gradient(const Context& context, const Param& values, const DeviceBatch& batch,
                           const View& dx, bool first, float factor) {
  if (!values.gradient.defined()) return;
  const ArenaFrame frame(context.arena);
  const View sum = take_virtual_rows(context, values.gradient.rows, batch, dx, factor);
  accumulate(context, values.gradient, sum, first);
}

}  // namespace lm
