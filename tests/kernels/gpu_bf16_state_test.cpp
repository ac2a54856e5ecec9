// Updates of rules with state in bf16, or with none, on the GPU: the CPU's bits.
#include "tests/kernels/gpu_support.h"

namespace lm {
namespace {

using Master = MasterForm;

void check_bf16_update(const char* rule_name, const RuleScalars& rule) {
  for (Master mode : {Master::kNearest, Master::kStochastic}) {
    for (DType gradient : kBoth) {
      for (int64_t n : {0, 1, 3, 4, 65, 1000, 4099}) {
        for (int shifted = -1; shifted < 5; ++shifted) {  // which array is not aligned
          SCOPED_TRACE(name(rule_name, gradient, {static_cast<int64_t>(mode), n, shifted}));
          const auto at = [&](int i) { return int64_t{i == shifted ? 1 : 0}; };
          Array v = noise(DType::kBF16, n, 3, 0.01, at(3));
          for (int64_t i = 0; i < n; ++i) v.values.set(i, std::abs(v.values[i]));
          check(
              {with(noise(gradient, n, 1, 1, at(0)), {kNotANumber, kInf, -kInf, 0., -0., 1e-42, 3.4e38, 1e20},
                    11),
               noise(DType::kBF16, n, 4, 1, at(1)), noise(DType::kBF16, n, 2, 0.1, at(2)), v,
               noise(DType::kBF16, n, 5, 0.001, at(4))},
              [&](const Kernels& k, StreamView s, const Pointers& p) {
                for (int step = 0; step < 2; ++step) {
                  k.update({.rule = rule,
                            .gradient = p[0],
                            .weight = p[1],
                            .state = {p[2], p[3], p[4]},
                            .elements = n,
                            .gradient_dtype = gradient,
                            .weight_dtype = DType::kBF16,
                            .form = mode,
                            .gradient_scale = 0.7f,
                            .rounding_key = 0xABCDEF0123456789u,
                            .first_index = 4096 + (shifted == 1 ? 37 : 0)},
                           s);
                }
              },
              Want::kBits);
        }
      }
    }
  }
}

TEST_F(GpuKernels, Bf16State) {
  check_bf16_update("adamw_bf16", AdamWBf16::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 3}));
  check_bf16_update("adamw_anyprecision",
                    AdamWAnyPrecision::at({}, {.lr = 1e-2, .weight_decay = 0.01, .t = 3}));
}

TEST_F(GpuKernels, SgdWithoutState) {
  for (const int64_t n : {3, 1000}) {
    check(
        {noise(DType::kF32, n, 1), noise(DType::kF32, n, 2)},
        [&](const Kernels& k, StreamView s, const Pointers& p) {
          k.update({.rule = Sgd{.lr = 1e-3F, .momentum = 0, .weight_decay = 0.01F},
                    .gradient = p[0],
                    .weight = p[1],
                    .elements = n},
                   s);
        },
        Want::kBits);
  }
}

}  // namespace
}  // namespace lm
