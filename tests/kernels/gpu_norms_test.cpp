// The forms of RMSNorm that gpu_kernels_test.cpp leaves out, and LayerNorm: near to their CPU counterparts'
// results over awkward shapes, and RMSNorm's roundings bit for bit.
#include <span>

#include "tests/kernels/gpu_support.h"
#include "tests/kernels/norm_reference.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

struct NormShape {
  int64_t rows, groups, width, pad, shift;
};

// 0 plain, 1 in place, 2 non-finite, 3 without what is optional, 4 dy with a stride of its own.
constexpr int kVariants = 5;
struct NormCase {
  NormCase(DType dtype, const NormShape& shape, int which) : t(dtype), s(shape), variant(which) {}
  DType t;
  NormShape s;
  int variant;
  int64_t stride = s.groups * s.width + s.pad, n = s.rows * stride, vectors = s.rows * s.groups;
  int64_t blocks = (s.rows + kRowBlock - 1) / kRowBlock;
  int64_t dy_stride = variant == 4 ? stride + 3 : stride;
  bool dense = s.groups == 1 && s.pad == 0;
  Array array(uint32_t seed, int64_t size) const {
    Array a = noise(t, size, seed, 1, s.shift);
    return variant == 2 ? with(a, {kNotANumber, kInf, -kInf, 0., -0., 1e30, 1e-38, 1e-42}, 61) : a;
  }
  // Where optional arrays are missing it lies at no multiple of 16, alone.
  Array weight(uint32_t seed) const {
    return noise(t, s.width, seed, 1, variant == 3 ? s.shift + 1 : s.shift);
  }
  // The same where dy has a stride of its own.
  Array beside(uint32_t seed, int64_t size) const {
    Array a = array(seed, size);
    a.shift += variant == 4 ? 1 : 0;
    return a;
  }
};

// In the short tier each shape has every second variant, in turn.
bool left_out(size_t shape, int variant) {
  return !test::full_counts() && (static_cast<size_t>(variant) + shape) % 2 != 0;
}

// The body of a forward pass over x, residual, weight, what is added to, out, sum and rstd.
Body rms_forward(const NormCase& c, const RmsForm& f) {
  return [=](const Kernels& k, StreamView v, const Pointers& p) {
    const bool residual = c.dense && c.variant == 0;
    void* const out = c.variant == 1 ? p[f.added ? 3 : 0] : p[4];
    k.rms_norm_forward({.x = p[0],
                        .residual = residual ? p[1] : nullptr,
                        .weight = f.weighted ? p[2] : nullptr,
                        .sum = residual ? p[5] : nullptr,
                        .add_to = f.added ? p[3] : nullptr,
                        .out = out,
                        .rstd = c.variant == 3 ? nullptr : f32(p[6]),
                        .rows = c.s.rows,
                        .groups = c.s.groups,
                        .width = c.s.width,
                        .x_stride = c.stride,
                        .out_stride = c.stride,
                        .eps = 1e-6f,
                        .factor = f.factor,
                        .form = f.form,
                        .dtype = c.t},
                       v);
  };
}
Arrays rms_arrays(const NormCase& c) {
  const Array zeroed = zeros(c.t, c.n, c.s.shift);
  return {c.array(1, c.n),
          c.array(2, c.n),
          c.weight(3),
          c.beside(4, c.n),
          zeroed,
          zeroed,
          zeros(DType::kF32, c.vectors)};
}

void check_rms_forward(const NormCase& c, const RmsForm& f) {
  if (f.added && !c.dense) return;
  // An output that is rounded the other way shows beside what it is added to.
  const double absolute = !f.added ? 1e-5 : c.t == DType::kBF16 ? 0.2 : 5e-5;
  check(rms_arrays(c), rms_forward(c, f), f.added ? Want::kNearFused : Want::kNear, absolute);
}

void check_rms_backward(const NormCase& c, const RmsForm& f) {
  const bool trained = f.weighted && c.variant != 3;
  // Only one form rounds what the weight's gradient is a sum of.
  const bool rounds = c.t == DType::kBF16 && f.form == WeightForm::kAfterRounding;
  check(
      {c.array(5, c.s.rows * c.dy_stride), c.array(6, c.n), c.weight(7), noise(c.t, c.n, 8, 1, c.s.shift),
       noise(DType::kF32, c.vectors, 9), zeros(DType::kF32, c.s.width),
       zeros(DType::kF32, c.blocks * c.s.width), zeros(c.t, c.n, c.s.shift)},
      [&](const Kernels& k, StreamView v, const Pointers& p) {
        k.rms_norm_backward({.dy = p[0],
                             .x = p[1],
                             .weight = f.weighted ? p[2] : nullptr,
                             .rstd = f32(p[4]),
                             .dresidual = c.dense ? p[3] : nullptr,
                             .dx = c.variant == 1 ? p[0] : p[7],
                             .dweight = trained ? f32(p[5]) : nullptr,
                             .partial = trained ? f32(p[6]) : nullptr,
                             .rows = c.s.rows,
                             .groups = c.s.groups,
                             .width = c.s.width,
                             .dy_stride = c.dy_stride,
                             .x_stride = c.stride,
                             .dx_stride = c.stride,
                             .form = f.form,
                             .dtype = c.t},
                            v);
      },
      Want::kNearFused, rounds ? 0.02 : 1e-3);
}

const NormShape kFormShapes[] = {{3, 1, 5, 0, 0},     {3, 1, 33, 0, 0},   {9, 3, 128, 8, 0},
                                 {9, 2, 24, 1, 0},    {9, 2, 128, 0, 1},  {65, 1, 16, 0, 0},
                                 {0, 1, 8, 0, 0},     {3, 1, 1024, 0, 0}, {3, 1, 1025, 0, 0},
                                 {67, 1, 1032, 0, 0}, {2, 1, 4100, 0, 0}};

TEST_F(GpuKernels, RmsNormForms) {
  for (DType t : kBoth) {
    for (const NormShape& s : kFormShapes) {
      for (const RmsForm& f : kRmsForms) {
        for (int variant = 0; variant < kVariants; ++variant) {
          // Each shape has one variant of each form in the short tier.
          const auto turn = static_cast<size_t>((&s - kFormShapes) + (&f - kRmsForms));
          if (!test::full_counts() && turn % kVariants != static_cast<size_t>(variant)) continue;
          SCOPED_TRACE(name("rms", t, {s.rows, s.groups, s.width, s.pad, s.shift, variant}) + ", " +
                       form_text(f));
          check_rms_forward({t, s, variant}, f);
          if (!f.added) check_rms_backward({t, s, variant}, f);
        }
      }
    }
  }
}

// In bf16 nothing but roundings is between the operations, so that no compiler can fuse two.
TEST_F(GpuKernels, RmsNormFormsRoundWhereTheyMust) {
  for (const NormShape& s : {NormShape{9, 1, 120, 0, 0}, NormShape{3, 1, 1031, 0, 0}}) {
    for (const RmsForm& f : kRmsForms) {
      SCOPED_TRACE(name("rms", DType::kBF16, {s.rows, s.width}) + ", " + form_text(f));
      const NormCase c(DType::kBF16, s, 0);  // x and residual become a sum
      const Outputs got = on_device(rms_arrays(c), rms_forward(c, f), 0);
      Values want(c.t, c.n);
      for (int64_t i = 0; i < c.n; ++i) {
        const auto number = [&](size_t array, int64_t at) { return static_cast<float>(got[array][at]); };
        want.set(i, rms_output(f, c.t, number(5, i) * number(6, i / s.width), number(2, i % s.width),
                               number(3, i)));
      }
      compare(got[4], want, Want::kBits, 0, 4);
    }
  }
}

// From 64 blocks of 64 rows one pass makes both gradients, of each form.
TEST_F(GpuKernels, RmsNormFormsBackwardOfManyRows) {
  const NormCase all[] = {NormCase(DType::kBF16, {4033, 1, 1032, 0, 0}, 1),
                          NormCase(DType::kF32, {4034, 1, 2056, 0, 0}, 0)};
  for (const NormCase& c : std::span(all).first(test::counts<size_t>(1, 2))) {
    for (const WeightForm form : {WeightForm::kOffset, WeightForm::kBeforeRounding}) {
      if (form == WeightForm::kBeforeRounding && !test::full_counts()) continue;
      SCOPED_TRACE(name("rms", c.t, {c.s.rows, c.s.width}) + ", " + form_text({.form = form}));
      check_rms_backward(c, {.form = form});
    }
  }
}

void check_layer_forward(const NormCase& c, bool offset) {
  const bool residual = c.dense && c.variant != 3, in_place = c.variant == 1;
  check(
      {c.array(1, c.n), c.array(2, c.n), c.weight(3), c.beside(4, c.s.width), zeros(c.t, c.n, c.s.shift),
       zeros(c.t, c.n, c.s.shift), zeros(DType::kF32, c.s.rows)},
      [&](const Kernels& k, StreamView v, const Pointers& p) {
        k.layer_norm_forward({.x = p[0],
                              .residual = residual ? p[1] : nullptr,
                              .weight = p[2],
                              .bias = c.variant == 3 ? nullptr : p[3],
                              .sum = !residual  ? nullptr
                                     : in_place ? p[0]
                                                : p[5],
                              .out = in_place && !residual ? p[0] : p[4],
                              .rstd = c.variant == 3 ? nullptr : f32(p[6]),
                              .rows = c.s.rows,
                              .width = c.s.width,
                              .x_stride = c.stride,
                              .out_stride = c.stride,
                              .eps = 1e-6f,
                              .offset = offset,
                              .dtype = c.t},
                             v);
      },
      Want::kNearFused, 5e-5);
}

void check_layer_backward(const NormCase& c, bool offset) {
  const bool weight = c.variant != 3 && c.variant != 4, bias = c.variant != 3 && c.variant != 1;
  check(
      {c.array(5, c.s.rows * c.dy_stride), c.array(6, c.n), c.weight(7), noise(c.t, c.n, 8, 1, c.s.shift),
       noise(DType::kF32, c.s.rows, 9), zeros(DType::kF32, c.s.width), zeros(DType::kF32, c.s.width),
       zeros(DType::kF32, 2 * c.blocks * c.s.width), zeros(c.t, c.n, c.s.shift)},
      [&](const Kernels& k, StreamView v, const Pointers& p) {
        k.layer_norm_backward({.dy = p[0],
                               .x = p[1],
                               .weight = p[2],
                               .rstd = f32(p[4]),
                               .dresidual = c.dense ? p[3] : nullptr,
                               .dx = c.variant == 1              ? p[0]
                                     : c.dense && c.variant == 2 ? p[3]
                                                                 : p[8],
                               .dweight = weight ? f32(p[5]) : nullptr,
                               .dbias = bias ? f32(p[6]) : nullptr,
                               .partial = weight || bias ? f32(p[7]) : nullptr,
                               .rows = c.s.rows,
                               .width = c.s.width,
                               .dy_stride = c.dy_stride,
                               .x_stride = c.stride,
                               .dx_stride = c.stride,
                               .offset = offset,
                               .dtype = c.t},
                              v);
      },
      Want::kNearFused, 1e-3);
}

TEST_F(GpuKernels, LayerNorm) {
  std::vector<NormShape> shapes;
  for (int64_t width : {1, 3, 5, 8, 31, 33, 120, 256, 1016, 1023, 1024, 1025, 1032, 2048, 4100}) {
    shapes.push_back({3, 1, width, 0, 0});
  }
  for (int64_t pad : {1, 4, 8}) shapes.push_back({9, 1, 128, pad, 0});
  for (int64_t shift : {1, 4, 8}) shapes.push_back({9, 1, 1040, 0, shift});
  shapes.insert(shapes.end(), {{0, 1, 8, 0, 0},
                               {64, 1, 16, 0, 0},
                               {65, 1, 24, 0, 0},
                               {130, 1, 264, 8, 0},
                               {193, 1, 3, 0, 0},
                               {66, 1, 2056, 0, 0},
                               {67, 1, 1031, 0, 0}});
  for (DType t : kBoth) {
    for (const NormShape& s : shapes) {
      const auto shape = static_cast<size_t>(&s - shapes.data());
      for (int variant = 0; variant < kVariants; ++variant) {
        if (left_out(shape, variant)) continue;
        SCOPED_TRACE(name("layer", t, {s.rows, s.width, s.pad, s.shift, variant}));
        const bool offset = (variant / 2 + static_cast<int>(shape)) % 2 == 0;
        check_layer_forward({t, s, variant}, offset);
        check_layer_backward({t, s, variant}, offset);
      }
    }
  }
}

// With a weight of 1 a row's output is its normalised input, and so is the weight's gradient where dy is 1.
// Far from 0 each order of the sum has another mean, a thousand times what fused operations may move.
void check_means(int64_t width, uint32_t seed) {
  SCOPED_TRACE(name("layer", DType::kF32, {width, seed}));
  Array x = noise(DType::kF32, width, seed), ones = with(zeros(DType::kF32, width), {1}, 1);
  for (int64_t j = 0; j < width; ++j) x.values.set(j, 10000 + x.values[j]);
  // Forward reads packs; backward does not, for where dx lies.
  const Outputs got = on_device(
      {x, ones, ones, zeros(DType::kF32, width), zeros(DType::kF32, 1), zeros(DType::kF32, width, 1),
       zeros(DType::kF32, width), zeros(DType::kF32, 2 * width)},
      [&](const Kernels& k, StreamView v, const Pointers& p) {
        k.layer_norm_forward({.x = p[0],
                              .weight = p[1],
                              .out = p[3],
                              .rstd = f32(p[4]),
                              .rows = 1,
                              .width = width,
                              .x_stride = width,
                              .out_stride = width,
                              .eps = 1e-6f},
                             v);
        k.layer_norm_backward({.dy = p[2],
                               .x = p[0],
                               .weight = p[1],
                               .rstd = f32(p[4]),
                               .dx = p[5],
                               .dweight = f32(p[6]),
                               .partial = f32(p[7]),
                               .rows = 1,
                               .width = width,
                               .dy_stride = width,
                               .x_stride = width,
                               .dx_stride = width},
                              v);
      },
      0);
  compare(got[6], got[3], Want::kNear, 1e-6, 6);
}

TEST_F(GpuKernels, LayerNormFindsOneMeanInAllItsPasses) {
  for (int64_t width : {128, 2048}) {
    for (uint32_t seed = 1; seed <= 8; ++seed) check_means(width, seed);
  }
}

// DoRA's kernels have the CPU's bits.
TEST_F(GpuKernels, LengthsOfRowsAndScaledColumns) {
  constexpr int64_t kRank = 5, kRows = 70;
  for (const DType t : kBoth) {
    for (const DType adapter : kBoth) {
      for (const int64_t width : {1, 63, 64, 130, 300}) {
        SCOPED_TRACE(name("dora", t, {width, adapter == DType::kF32}));
        const auto of = [](void* p, DType type, int64_t columns) { return view_of(p, type, kRows, columns); };
        check(
            {noise(t, kRows * width, 1), noise(adapter, kRows * kRank, 2), noise(adapter, kRows * kRank, 3),
             noise(adapter, kRows, 4), zeros(DType::kF32, kRows), zeros(DType::kF32, kRows)},
            [&](const Kernels& k, StreamView v, const Pointers& p) {
              k.adapted_norms({.weight = of(p[0], t, width),
                               .b = of(p[1], adapter, kRank),
                               .h = of(p[2], adapter, kRank),
                               .magnitude = p[3],
                               .scale = 0.1f,
                               .norms = f32(p[4]),
                               .factors = f32(p[5])},
                              v);
            },
            Want::kBits);
      }
    }
    for (const int64_t width : {1, 127, 130}) {
      SCOPED_TRACE(name("columns", t, {width}));
      const auto of = [&](void* p) { return view_of(p, t, kRows, width); };
      check(
          {noise(t, kRows * width, 1), noise(t, kRows * width, 2), noise(t, kRows * width, 3),
           noise(DType::kF32, width, 4), noise(DType::kF32, width, 5), noise(t, width, 6),
           zeros(DType::kF32, width), zeros(DType::kF32, 2 * width), zeros(t, kRows * width)},
          [&](const Kernels& k, StreamView v, const Pointers& p) {
            k.scale_columns_backward({.dy = of(p[0]),
                                      .x = of(p[1]),
                                      .out = of(p[8]),
                                      .rest = of(p[2]),
                                      .factors = f32(p[3]),
                                      .norms = f32(p[4]),
                                      .sums = f32(p[6]),
                                      .partial = f32(p[7])},
                                     v);
            k.scale_columns({.x = of(p[0]),
                             .out = of(p[1]),
                             .factors = f32(p[3]),
                             .bias = p[5],
                             .addend = of(p[1]),
                             .subtrahend = of(p[2])},
                            v);
            k.scale_columns({.x = of(p[1]), .out = of(p[0])}, v);
          },
          Want::kBits);
    }
  }
}

}  // namespace
}  // namespace lm
