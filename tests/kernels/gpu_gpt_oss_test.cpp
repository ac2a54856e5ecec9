// What gpt-oss has of its own on the GPU against the CPU's kernels: sinks, the clamped GLU, and MXFP4.
#include "tests/kernels/gpu_support.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

struct Heads {
  int64_t tokens, heads, head_dim;
};
const Heads kHeads[] = {{0, 2, 16}, {1, 1, 1}, {7, 3, 16}, {70, 2, 67}, {33, 5, 64}};

// out, sinks, lse of which some are far above and below the sinks, and dout.
Arrays attended(DType t, const Heads& h, int64_t shift) {
  const int64_t n = h.tokens * h.heads;
  return {noise(t, n * h.head_dim, 1, 1, shift), noise(t, h.heads, 2, 1, shift),
          with(noise(DType::kF32, n, 3, 3, shift), {90, 0.5, -90, 2, 1, -3}, 3),
          noise(t, n * h.head_dim, 4, 1, shift)};
}

TEST_F(GpuKernels, SinksJoinASoftmax) {
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Heads& h : kHeads) {
      for (const int64_t shift : {0, 1}) {
        SCOPED_TRACE(name("sinks", t, {h.tokens, h.heads, h.head_dim, shift}));
        check(
            attended(t, h, shift),
            [&](const Kernels& k, StreamView s, const Pointers& p) {
              k.add_sinks({.sinks = p[1],
                           .out = p[0],
                           .lse = f32(p[2]),
                           .tokens = h.tokens,
                           .heads = h.heads,
                           .head_dim = h.head_dim,
                           .dtype = t},
                          s);
            },
            Want::kNear);
      }
    }
  }
}

TEST_F(GpuKernels, GradientsOfSinks) {
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Heads& h : kHeads) {
      SCOPED_TRACE(name("sinks' gradient", t, {h.tokens, h.heads, h.head_dim}));
      Arrays arrays = attended(t, h, 0);
      // With the sinks in it a sum is not below them.
      for (int64_t i = 0; i < arrays[2].values.size(); ++i)
        arrays[2].values.set(i, std::abs(arrays[2].values[i]));
      arrays.push_back(noise(DType::kF32, h.heads, 5));
      check(
          arrays,
          [&](const Kernels& k, StreamView s, const Pointers& p) {
            k.sinks_gradient({.sinks = p[1],
                              .out = p[0],
                              .dout = p[3],
                              .lse = f32(p[2]),
                              .gradient = f32(p[4]),
                              .tokens = h.tokens,
                              .heads = h.heads,
                              .head_dim = h.head_dim,
                              .dtype = t},
                             s);
          },
          Want::kNear, 1e-4);
    }
  }
}

TEST_F(GpuKernels, AClampedGluOfNeighbours) {
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t rows : {0, 1, 5}) {
      for (const int64_t ffn : {1, 24, 67, 300}) {
        for (const int64_t shift : {0, 1}) {
          SCOPED_TRACE(name("clamped glu", t, {rows, ffn, shift}));
          // At the limits, beyond them, and no numbers.
          const Arrays arrays = {
              with(noise(t, rows * 2 * ffn, 1, 1, shift), {0.75, -0.75, kInf, -kInf, kNotANumber, 3, -3}, 5),
              zeros(t, rows * ffn, shift), noise(t, rows * ffn, 2, 1, shift)};
          check(
              arrays,
              [&](const Kernels& k, StreamView s, const Pointers& p) {
                k.clamped_glu_forward({.gate_up = p[0],
                                       .out = p[1],
                                       .rows = rows,
                                       .ffn = ffn,
                                       .alpha = 1.702F,
                                       .limit = 0.75F,
                                       .dtype = t},
                                      s);
                k.clamped_glu_backward({.gate_up = p[0],
                                        .dh = p[2],
                                        .rows = rows,
                                        .ffn = ffn,
                                        .alpha = 1.702F,
                                        .limit = 0.75F,
                                        .dtype = t},
                                       s);
              },
              Want::kNear);
        }
      }
    }
  }
}

// All codes with all scales; whole rows, and a range of columns.
TEST_F(GpuKernels, Mxfp4HasTheCpusBits) {
  constexpr int64_t kRows = 256, kColumns = 64;
  std::vector<int32_t> codes(kRows * kColumns / 8), scales(kRows * kColumns / kMxBlock / 4);
  const auto bytes = [](std::vector<int32_t>& words) { return reinterpret_cast<uint8_t*>(words.data()); };
  for (size_t i = 0; i < codes.size() * 4; ++i) bytes(codes)[i] = static_cast<uint8_t>(i * 37 + i / 256);
  for (size_t i = 0; i < scales.size() * 4; ++i) bytes(scales)[i] = static_cast<uint8_t>(i * 7);
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t first : {int64_t{0}, kMxBlock}) {
      for (const int64_t shift : {0, 1}) {
        SCOPED_TRACE(name("mxfp4", t, {first, shift}));
        const int64_t columns = kColumns - first;
        check(
            {zeros(t, kRows * columns, shift), numbers(codes), numbers(scales)},
            [&](const Kernels& k, StreamView s, const Pointers& p) {
              k.materialise(
                  {.kind = EncodingKind::kMxfp4,
                   .pieces = {static_cast<const std::byte*>(p[1]), static_cast<const std::byte*>(p[2])},
                   .out = view_of(p[0], t, kRows, columns),
                   .first = first,
                   .columns = kColumns},
                  s);
            },
            Want::kBits);
      }
    }
  }
}

}  // namespace
}  // namespace lm
