// The launchers of one instruction set as a table (compiled once for each, like every *_cpu.cpp here).
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {

extern const Kernels kTable;
const Kernels kTable = {
    .rms_norm_forward = rms_norm_forward,
    .rms_norm_backward = rms_norm_backward,
    .rope = rope,
    .swiglu_forward = swiglu_forward,
    .swiglu_backward = swiglu_backward,
    .softmax_statistics = softmax_statistics,
    .softmax_gradient = softmax_gradient,
    .softmax_loss = softmax_loss,
    .gather_rows = gather_rows,
    .scatter_rows = scatter_rows,
    .sum_rows = sum_rows,
    .add_rows = add_rows,
    .accumulate = accumulate,
    .sum_columns = sum_columns,
    .add_bias = add_bias,
    .dropout = dropout,
    .granule_norms = granule_norms,
    .normalise = normalise,
    .update = update,
    .materialise = materialise,
    .chunk_sums = chunk_sums_cpu,
    .multiply_row = multiply_row,
    .quantise = quantise,
    .gemm = gemm,
};

}  // namespace lm::LM_ISA
