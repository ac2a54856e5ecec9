// The GPU launchers whose results are near to their CPU counterparts', which the other tests hold against
// fp64: within the rounding of their reductions, exp and contraction, over awkward shapes: norms and the
// loss. gpu_elementwise_test.cpp has those of elements, gpu_fixed_bits_test.cpp the others.
#include <span>

#include "tests/kernels/gpu_support.h"
#include "tests/support/counts.h"

namespace lm {

__attribute__((weak)) int gpu_variants() {
  return 2;
}
__attribute__((weak)) void use_gpu_variant(int) {}

namespace {

struct NormShape {
  int64_t rows, groups, width, pad, shift;
};

// 0 plain, 1 in place, 2 non-finite, 3 without what is optional, 4 dy with a stride of its own.
struct NormCase {
  NormCase(DType dtype, const NormShape& shape, int which) : t(dtype), s(shape), variant(which) {}
  DType t;
  NormShape s;
  int variant;
  int64_t stride = s.groups * s.width + s.pad, n = s.rows * stride, vectors = s.rows * s.groups;
  int64_t other = variant == 3 ? stride + 8 : stride;  // of what is written
  int64_t dy_stride = variant == 4 ? stride + 3 : stride;
  bool add = s.groups == 1 && s.pad == 0;
  Array array(uint32_t seed, int64_t size) const {
    Array a = noise(t, size, seed, 1, s.shift);
    return variant == 2 ? with(a, {kNotANumber, kInf, -kInf, 0., -0., 1e30, 1e-38, 1e-42}, 61) : a;
  }
  // Where optional arrays are missing it lies at no multiple of 16, alone.
  Array weight(uint32_t seed) const {
    return noise(t, s.width, seed, 1, variant == 3 ? s.shift + 1 : s.shift);
  }
};

void check_norm_forward(const NormCase& c) {
  check(
      {c.array(1, c.n), c.array(2, c.n), c.weight(3), zeros(c.t, c.n, c.s.shift),
       zeros(c.t, c.s.rows * c.other, c.s.shift), zeros(DType::kF32, c.vectors)},
      [&](const Kernels& k, StreamView v, const Pointers& p) {
        k.rms_norm_forward({.x = p[0],
                            .residual = c.add ? p[1] : nullptr,
                            .weight = p[2],
                            .sum = !c.add           ? nullptr
                                   : c.variant == 1 ? p[0]
                                                    : p[3],
                            .out = c.variant == 1 && !c.add ? p[0] : p[4],
                            .rstd = c.variant == 3 ? nullptr : f32(p[5]),
                            .rows = c.s.rows,
                            .groups = c.s.groups,
                            .width = c.s.width,
                            .x_stride = c.stride,
                            .out_stride = c.variant == 1 && !c.add ? c.stride : c.other,
                            .eps = 1e-6f,
                            .dtype = c.t},
                           v);
      },
      Want::kNear, 1e-5);
}

void check_norm_backward(const NormCase& c) {
  check(
      {c.array(4, c.s.rows * c.dy_stride), c.array(5, c.n), c.weight(6), noise(c.t, c.n, 7, 1, c.s.shift),
       noise(DType::kF32, c.vectors, 8), zeros(DType::kF32, c.s.width),
       zeros(DType::kF32, (c.s.rows + 63) / 64 * c.s.width), zeros(c.t, c.s.rows * c.other, c.s.shift)},
      [&](const Kernels& k, StreamView v, const Pointers& p) {
        void* dx = c.variant == 1            ? p[0]
                   : c.add && c.variant == 2 ? p[3]
                                             : p[7];  // dx may be dy or dresidual
        k.rms_norm_backward({.dy = p[0],
                             .x = p[1],
                             .weight = p[2],
                             .rstd = f32(p[4]),
                             .dresidual = c.add ? p[3] : nullptr,
                             .dx = dx,
                             .dweight = c.variant == 3 ? nullptr : f32(p[5]),
                             .partial = c.variant == 3 ? nullptr : f32(p[6]),
                             .rows = c.s.rows,
                             .groups = c.s.groups,
                             .width = c.s.width,
                             .dy_stride = c.dy_stride,
                             .x_stride = c.stride,
                             .dx_stride = c.other,
                             .dtype = c.t},
                            v);
      },
      Want::kNearFused, c.t == DType::kBF16 ? 0.02 : 1e-3);
}

TEST_F(GpuKernels, RmsNorm) {
  std::vector<NormShape> shapes;
  for (int64_t width : {1,   2,   3,   4,    5,    8,    12,   31,   32,   33,   64,  120,
                        128, 255, 256, 1016, 1023, 1024, 1025, 1028, 1032, 2048, 4100}) {
    shapes.push_back({3, 1, width, 0, 0});
  }
  for (int64_t width : {8, 24, 128, 1024, 1040}) {
    for (int64_t pad : {0, 1, 4, 8, 24}) shapes.push_back({9, 3, width, pad, 0});
    for (int64_t shift : {1, 2, 4, 8}) shapes.push_back({9, 2, width, 0, shift});
  }
  shapes.insert(shapes.end(), {{0, 1, 8, 0, 0},
                               {1, 1, 7, 0, 0},
                               {64, 1, 16, 0, 0},
                               {65, 1, 16, 0, 0},
                               {129, 2, 136, 8, 0},
                               {70, 1, 3, 0, 0},
                               {130, 3, 64, 0, 0},
                               {66, 1, 2048, 0, 0},
                               {3, 1, 1031, 0, 0},
                               {3, 1, 4096, 0, 0},
                               {2, 1, 8192, 0, 0},
                               {2, 1, 8200, 0, 0}});
  for (DType t : kBoth) {
    for (const NormShape& s : shapes) {
      // In the short tier each shape has every second variant, in turn.
      for (int variant = 0; variant < 5; ++variant) {
        if (!test::full_counts() && (variant + (&s - shapes.data())) % 2 != 0) continue;
        SCOPED_TRACE(name("rms", t, {s.rows, s.groups, s.width, s.pad, s.shift, variant}));
        check_norm_forward({t, s, variant});
        check_norm_backward({t, s, variant});
      }
    }
  }
}

// From 64 blocks of 64 rows one pass makes both gradients, in three forms by the packs of a row: 129, 257,
// 258 and 514 of them. The last block has one row, two, or an odd number.
TEST_F(GpuKernels, RmsNormBackwardOfManyRows) {
  const NormCase all[] = {
      NormCase(DType::kBF16, {4051, 1, 2056, 0, 0}, 1), NormCase(DType::kF32, {4034, 1, 1032, 0, 0}, 0),
      NormCase(DType::kBF16, {4033, 1, 1032, 0, 0}, 2), NormCase(DType::kF32, {4033, 1, 2056, 0, 0}, 2)};
  for (const NormCase& c : std::span(all).first(test::counts<size_t>(2, 4))) {
    SCOPED_TRACE(name("rms", c.t, {c.s.rows, c.s.width, c.variant}));
    check_norm_backward(c);
  }
}

struct LossShape {
  int64_t rows, columns, segment, pad, shift;
};

std::vector<int32_t> targets_of(const LossShape& s) {
  std::vector<int32_t> out;
  for (int64_t r = 0; r < s.rows; ++r)
    out.push_back(static_cast<int32_t>((r * 389 + s.columns - 1) % s.columns));
  return out;
}

TEST_F(GpuKernels, Softmax) {
  std::vector<LossShape> shapes;
  for (int64_t columns : {1, 2, 3, 4, 8, 9, 255, 256, 257, 1024, 2048, 2049, 8195})
    shapes.push_back({2, columns, columns, 0, 0});
  shapes.insert(shapes.end(), {{0, 16, 16, 0, 0},
                               {7, 1000, 256, 0, 0},
                               {7, 1000, 256, 24, 0},
                               {5, 1000, 300, 1, 0},
                               {5, 101, 8, 7, 1},
                               {3, 129, 128, 0, 2},
                               {3, 512, 128, 8, 8},
                               {3, 512, 128, 8, 4},
                               {9, 577, 577, 0, 0},
                               {60, 96, 64, 0, 0},
                               {3, 20000, 8192, 0, 0}});
  for (DType t : kBoth) {
    for (const LossShape& s : shapes) {
      for (int variant = 0; variant < 6;
           ++variant) {  // 1: -inf here and there; 2: first segment all -inf; 3: NaN; 4: inf; 5: large
        SCOPED_TRACE(name("softmax", t, {s.rows, s.columns, s.segment, s.pad, s.shift, variant}));
        const int64_t stride = s.columns + s.pad;
        Array logits = noise(t, s.rows * stride, 1, variant == 5 ? 1e4 : 4, s.shift);
        if (variant == 1) logits = with(logits, {-kInf, -1e30, 0}, 37);
        if (variant == 2) {
          for (int64_t r = 0; r < s.rows; ++r) {
            for (int64_t j = 0; j < std::min(s.segment, s.columns); ++j)
              logits.values.set(r * stride + j, -kInf);
          }
        }
        if (variant >= 3 && variant < 5 && s.rows > 0) {
          for (int64_t j : {int64_t{0}, s.columns / 2, s.columns - 1})
            logits.values.set((j % s.rows) * stride + j, variant == 3 ? kNotANumber : kInf);
        }
        const auto scalars = [&] { return zeros(DType::kF32, s.rows); };
        check(
            {logits, numbers(targets_of(s)), scalars(), scalars(), scalars(), zeros(DType::kF32, 2),
             noise(DType::kF32, s.rows, 5)},
            [&](const Kernels& k, StreamView v, const Pointers& p) {
              const int64_t size = static_cast<int64_t>(dtype_size(t));
              for (int64_t first = 0; first < s.columns; first += s.segment) {
                k.softmax_statistics({.logits = static_cast<char*>(p[0]) + first * size,
                                      .target = i32(p[1]),
                                      .max = f32(p[2]),
                                      .sum = f32(p[3]),
                                      .target_logit = f32(p[4]),
                                      .rows = s.rows,
                                      .columns = std::min(s.segment, s.columns - first),
                                      .stride = stride,
                                      .first_column = first,
                                      .first_segment = first == 0,
                                      .dtype = t},
                                     v);
              }
              k.softmax_loss({.max = f32(p[2]),
                              .sum = f32(p[3]),
                              .target_logit = f32(p[4]),
                              .total = static_cast<double*>(p[5]),
                              .rows = 0},
                             v);
              for (int64_t first = 0; first < s.columns; first += s.segment) {
                k.softmax_gradient({.logits = static_cast<char*>(p[0]) + first * size,
                                    .target = i32(p[1]),
                                    .max = f32(p[2]),
                                    .sum = f32(p[3]),
                                    .rows = s.rows,
                                    .columns = std::min(s.segment, s.columns - first),
                                    .stride = stride,
                                    .first_column = first,
                                    .scale = 0.25f,
                                    .weight = variant % 2 == 0 ? nullptr : f32(p[6]),
                                    .dtype = t},
                                   v);
              }
            },
            Want::kNear, 1e-6);
      }
    }
  }
}

// Few different logits, so that most rows have several largest ones; their number is added to the one there.
TEST_F(GpuKernels, ATargetIsCorrectIfItIsTheFirstOfTheLargestLogits) {
  for (DType t : kBoth) {
    for (const auto& [columns, segment] : {std::array<int64_t, 2>{40, 16}, {577, 64}, {5000, 5000}}) {
      SCOPED_TRACE(name("correct", t, {columns, segment}));
      const int64_t rows = columns < 1000 ? 300 : 20;
      Array logits = zeros(t, rows * columns);
      std::vector<int32_t> targets;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t target = r * 37 % columns;
        targets.push_back(static_cast<int32_t>(target));
        for (int64_t j = 0; j < columns; ++j)
          logits.values.set(r * columns + j,
                            static_cast<double>((r * 131 + j * j * 7 + j * r) % (columns / 4 + 2)));
        if (r % 2 == 0) logits.values.set(r * columns + target, static_cast<double>(columns / 4 + 1));
      }
      const auto scalars = [&] { return zeros(DType::kF32, rows); };
      check(
          {logits, numbers(targets), scalars(), scalars(), scalars(), scalars(), scalars(),
           with(scalars(), {1}, 1), zeros(DType::kF32, 4)},
          [&, segment = segment, columns = columns](const Kernels& k, StreamView v, const Pointers& p) {
            const int64_t size = static_cast<int64_t>(dtype_size(t));
            for (int64_t first = 0; first < columns; first += segment) {
              k.softmax_statistics({.logits = static_cast<char*>(p[0]) + first * size,
                                    .target = i32(p[1]),
                                    .max = f32(p[2]),
                                    .sum = f32(p[3]),
                                    .target_logit = f32(p[4]),
                                    .correct = f32(p[5]),
                                    .rows = rows,
                                    .columns = std::min(segment, columns - first),
                                    .stride = columns,
                                    .first_column = first,
                                    .first_segment = first == 0,
                                    .dtype = t},
                                   v);
            }
            // 0 + log(1) - 0: the loss is 0 everywhere.
            k.softmax_loss({.max = f32(p[6]),
                            .sum = f32(p[7]),
                            .target_logit = f32(p[6]),
                            .correct = f32(p[5]),
                            .total = static_cast<double*>(p[8]),
                            .correct_total = static_cast<double*>(p[8]) + 1,
                            .rows = rows},
                           v);
          },
          Want::kNear, 0);
    }
  }
}

// log(1) is 0 everywhere, so the order of the additions shows in the bits.
TEST_F(GpuKernels, SoftmaxLossAddsInRowOrder) {
  for (int64_t rows : {0, 1, 2, 255, 256, 257, 512, 1000}) {
    for (const bool weighted : {false, true}) {
      SCOPED_TRACE(name("loss", DType::kF32, {rows, weighted}));
      check(
          {noise(DType::kF32, rows, 1, 1e4), with(zeros(DType::kF32, rows), {1}, 1),
           noise(DType::kF32, rows, 3), noise(DType::kF32, 2, 4), noise(DType::kF32, rows, 5),
           zeros(DType::kF32, rows)},
          [&](const Kernels& k, StreamView v, const Pointers& p) {
            k.softmax_loss({.max = f32(p[0]),
                            .sum = f32(p[1]),
                            .target_logit = f32(p[2]),
                            .weight = weighted ? f32(p[4]) : nullptr,
                            .nll = weighted ? f32(p[5]) : nullptr,
                            .total = static_cast<double*>(p[3]),
                            .rows = rows},
                           v);
          },
          Want::kBits);
    }
  }
}

TEST_F(GpuKernels, SoftmaxLossTakesTheLogarithm) {
  const int64_t rows = 300;
  double total[2];
  Arrays arrays{noise(DType::kF32, rows, 1), with(zeros(DType::kF32, rows), {1, 1.5, 3, 1e-3, 1e6}, 1),
                noise(DType::kF32, rows, 3), zeros(DType::kF32, 2)};
  const Body loss = [&](const Kernels& k, StreamView v, const Pointers& p) {
    k.softmax_loss({.max = f32(p[0]),
                    .sum = f32(p[1]),
                    .target_logit = f32(p[2]),
                    .total = static_cast<double*>(p[3]),
                    .rows = rows},
                   v);
  };
  const Outputs device = on_device(arrays, loss, 0);
  Pointers pointers;
  for (Array& a : arrays) pointers.push_back(a.values.data());
  loss(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1}, pointers);
  std::memcpy(&total[0], device[3].data(), 8);
  std::memcpy(&total[1], arrays[3].values.data(), 8);
  EXPECT_NE(total[1], 0);
  EXPECT_NEAR(total[0], total[1], 1e-6 * static_cast<double>(rows));  // logf differs in the last place
}

}  // namespace
}  // namespace lm
