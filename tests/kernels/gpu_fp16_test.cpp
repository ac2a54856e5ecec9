// fp16 on a GPU: the CPU's bits where these are fixed, and near them elsewhere.
#include "base/philox.h"
#include "tests/kernels/gpu_support.h"

namespace lm {
namespace {

constexpr DType kHalf = DType::kF16;

TEST_F(GpuKernels, Fp16ConvertsLikeTheCpu) {
  for (const bool to_half : {true, false}) {
    for (const int64_t n : {1, 7, 64, 4100}) {
      for (const int64_t shift : {0, 1, 2}) {
        const DType to = to_half ? kHalf : DType::kF32, from = to_half ? DType::kF32 : kHalf;
        SCOPED_TRACE(name("accumulate", to, {n, shift}));
        check(
            {noise(to, n, 1, 1, shift),
             with(noise(from, n, 2, 1, shift), {kInf, 65519., 65520., 6e-8, 3e-8, -0., 1e-42, 0x1p-14}, 5)},
            [&](const Kernels& k, StreamView v, const Pointers& p) {
              k.accumulate({.to = p[0],
                            .from = p[1],
                            .elements = n,
                            .to_dtype = to,
                            .from_dtype = from,
                            .overwrite = true},
                           v);
            },
            Want::kBits);
      }
    }
  }
}

TEST_F(GpuKernels, Fp16WeightsAreUpdatedLikeTheCpus) {
  for (const MasterForm form : {MasterForm::kF32OfFp16, MasterForm::kStochasticFp16}) {
    for (const int64_t n : {1, 3, 64, 1025}) {
      SCOPED_TRACE(name("adamw", kHalf, {static_cast<int64_t>(form), n}));
      Array v = noise(DType::kF32, n, 3, 0.01);
      for (int64_t i = 0; i < n; ++i) v.values.set(i, std::abs(v.values[i]));
      check(
          {with(noise(DType::kF32, n, 1), {kNotANumber, kInf, 0., 1e20}, 11), noise(kHalf, n, 4, 1e-4),
           noise(DType::kF32, n, 5), noise(DType::kF32, n, 2, 0.1), v},
          [&](const Kernels& k, StreamView s, const Pointers& p) {
            k.update({.rule = AdamW::at({}, {.lr = 1e-3, .weight_decay = 0.1, .t = 3}),
                      .gradient = p[0],
                      .weight = p[1],
                      .master = has_master(form) ? p[2] : nullptr,
                      .state = {f32(p[3]), f32(p[4])},
                      .elements = n,
                      .weight_dtype = kHalf,
                      .form = form,
                      .gradient_scale = 1.F / 1024,
                      .rounding_key = philox_key(3, Purpose::kRounding, 7, 9)},
                     s);
          },
          Want::kBits);
    }
  }
}

TEST_F(GpuKernels, Fp16IsGated) {
  for (const int64_t width : {8, 33, 256}) {
    SCOPED_TRACE(name("gated", kHalf, {width}));
    check(
        {noise(kHalf, 5 * 2 * width, 1), zeros(kHalf, 5 * width)},
        [&](const Kernels& k, StreamView v, const Pointers& p) {
          k.gated_forward({.gate_up = p[0], .out = p[1], .rows = 5, .ffn = width, .dtype = kHalf}, v);
        },
        Want::kNear, 1e-3);
  }
}

}  // namespace
}  // namespace lm
