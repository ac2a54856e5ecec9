#include "plan/nominal_time.h"

#include <algorithm>

#include "plan/cost_model.h"

namespace lm {
namespace {

// Shares of the peaks that large products and long copies reach.
constexpr double kProducts = 0.7, kCopies = 0.8;
// A product of few rows fills the card less: it has half of the rate at so many rows, as a share of the
// operations that the card does while it reads a byte. On an H200 (bench_gpu_gemm) 2048 rows lose 3 to 5 %.
constexpr double kHalfRate = 0.35;

struct Nominal {
  double flops, bandwidth;
};

Nominal nominal(const PlanInput& in) {
  const Gpu& here = in.machine.gpus.front();
  const Gpu known = built_in_gpu(here.name);
  const Gpu& gpu = known.bf16_flops > 0 ? known : here;
  const bool fp32 = in.config.model.dtype == ModelDType::kF32;
  const double peak = fp32 ? gpu.fp32_flops : gpu.bf16_flops;
  const double assumed = fp32 ? kAssumedGpuF32 : kAssumedGpuBF16;
  return {kProducts * (peak > 0 ? peak : assumed),
          kCopies * (gpu.bandwidth > 0 ? gpu.bandwidth : kAssumedGpuBandwidth)};
}

}  // namespace

double nominal_product_seconds(const PlanInput& in, int64_t micro_tokens, bool recomputes) {
  double blocks = 0, all = 0, trained = 0;  // elements of matrices
  const int64_t last = std::ssize(in.layout.blocks) - 1;
  for (int64_t b = 1; b <= last; ++b) {
    for (const TensorPlace& place : in.layout.blocks[static_cast<size_t>(b)].tensors) {
      if (place.parameter.kind != ParameterKind::kMatrix) continue;
      const auto elements = static_cast<double>(place.parameter.elements());
      all += elements;
      if (b < last) blocks += elements;
      if (!place.frozen) trained += elements;
    }
  }
  const Nominal card = nominal(in);
  const auto rows = static_cast<double>(micro_tokens);
  const double half = kHalfRate * card.flops / card.bandwidth;
  const double weight = in.config.model.dtype == ModelDType::kF32 ? 4 : 2;
  const double gradient = in.config.train.gradients == GradientDType::kF32 ? 4 : 2;
  // Of a product of each matrix in `elements`: multiplied, or bound by what it reads and writes of the
  // matrix.
  const auto product = [&](double elements, double bytes) {
    return std::max(2 * elements * (rows + half) / card.flops, elements * bytes / card.bandwidth);
  };
  const double micro =
      2 * product(all, weight) + product(trained, 2 * gradient) + (recomputes ? product(blocks, weight) : 0);
  const double step_tokens =
      static_cast<double>(in.config.train.global_batch) * static_cast<double>(in.config.data.max_length);
  return micro * step_tokens / rows;
}

}  // namespace lm
