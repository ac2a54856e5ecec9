// The GPU launchers, one .cu file per group. Private to src/kernels; everybody else calls through the table.
#pragma once

#include "kernels/kernels.h"

namespace lm::gpu {

void rms_norm_forward(const RmsNormForward&, StreamView);
void rms_norm_backward(const RmsNormBackward&, StreamView);
void rope(const Rope&, StreamView);
void swiglu_forward(const SwigluForward&, StreamView);
void swiglu_backward(const SwigluBackward&, StreamView);
void softmax_statistics(const SoftmaxStatistics&, StreamView);
void softmax_gradient(const SoftmaxGradient&, StreamView);
void softmax_loss(const SoftmaxLoss&, StreamView);
void gather_rows(const GatherRows&, StreamView);
void scatter_rows(const ScatterRows&, StreamView);
void sum_rows(const SumRows&, StreamView);
void add_rows(const AddRows&, StreamView);
void accumulate(const Accumulate&, StreamView);
void sum_columns(const SumColumns&, StreamView);
void add_bias(const AddBias&, StreamView);
void dropout(const Dropout&, StreamView);
void granule_norms(const GranuleNorms&, StreamView);
void normalise(const Normalise&, StreamView);
void update(const RuleUpdate&, StreamView);
void materialise(const Materialise&, StreamView);
void chunk_sums(const ChunkSums&, StreamView);

}  // namespace lm::gpu
