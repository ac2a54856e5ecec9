// The GPU launchers of one element or pair of elements each, near to their CPU counterparts: RoPE,
// activations, and the scale and cap of logits.
#include "tests/kernels/gpu_support.h"

namespace lm {
namespace {

TEST_F(GpuKernels, Rope) {
  for (DType t : kBoth) {
    for (int64_t rows : {0, 1, 5}) {
      for (int64_t heads : {1, 3, 40}) {
        for (int64_t d : {2, 4, 6, 8, 16, 24, 64, 130}) {  // packs: 16 and 64, of fp32 8 and 24, too
          for (int64_t pad : {0, 3, 8}) {
            SCOPED_TRACE(name("rope", t, {rows, heads, d, pad}));
            std::vector<int32_t> position;
            for (int32_t r = 0; r < rows; ++r) position.push_back(9 - r * 2);
            const int64_t stride = heads * d + pad;
            for (bool inverse : {false, true}) {
              check(
                  {noise(t, rows * stride, 1, 1, pad), noise(DType::kF32, 10 * d / 2, 2),
                   noise(DType::kF32, 10 * d / 2, 3), numbers(position)},
                  [&](const Kernels& k, StreamView v, const Pointers& p) {
                    k.rope({.x = p[0],
                            .cos = f32(p[1]),
                            .sin = f32(p[2]),
                            .position = i32(p[3]),
                            .rows = rows,
                            .heads = heads,
                            .head_dim = d,
                            .x_stride = stride,
                            .inverse = inverse,
                            .dtype = t},
                           v);
                  },
                  Want::kNear);
            }
          }
        }
      }
    }
  }
}

// Of a head, `dim` features; conditions of packs fail for the part, the head, or neither.
TEST_F(GpuKernels, RopeOfPartsAndNeighbours) {
  struct Shape {
    int64_t head_dim, dim;
  };
  for (DType t : kBoth) {
    for (const Shape& s : {Shape{2, 0},
                           {6, 0},
                           {64, 0},
                           {128, 0},
                           {24, 8},
                           {24, 16},
                           {20, 16},
                           {18, 16},
                           {10, 6},
                           {130, 64},
                           {128, 96},
                           {96, 66}}) {
      for (int64_t pad : {0, 3, 8}) {
        for (int which = 0; which < 4; ++which) {
          const bool neighbours = which % 2 != 0, inverse = which / 2 != 0;
          SCOPED_TRACE(name("rope", t, {s.head_dim, s.dim, pad, neighbours, inverse}));
          const int64_t rows = 5, heads = 4, stride = heads * s.head_dim + pad,
                        half = (s.dim > 0 ? s.dim : s.head_dim) / 2;
          check(
              {noise(t, rows * stride, 1, 1, pad), noise(DType::kF32, 10 * half, 2),
               noise(DType::kF32, 10 * half, 3), numbers({9, 0, 3, 3, 7})},
              [&](const Kernels& k, StreamView v, const Pointers& p) {
                k.rope({.x = p[0],
                        .cos = f32(p[1]),
                        .sin = f32(p[2]),
                        .position = i32(p[3]),
                        .rows = rows,
                        .heads = heads,
                        .head_dim = s.head_dim,
                        .x_stride = stride,
                        .dim = s.dim,
                        .neighbours = neighbours,
                        .inverse = inverse,
                        .dtype = t},
                       v);
              },
              Want::kNear);
        }
      }
    }
  }
}

TEST_F(GpuKernels, ScaleByPosition) {
  for (DType t : kBoth) {
    for (int64_t rows : {0, 5}) {
      for (int64_t width : {1, 3, 4, 8, 64, 130, 1024, 1028, 1032, 2056}) {
        for (int64_t pad : {0, 3, 8}) {
          SCOPED_TRACE(name("scale", t, {rows, width, pad}));
          const int64_t stride = width + pad;
          check(
              {noise(t, rows * stride, 1, 1, pad), numbers({7, 8, 100, 30000, 0})},
              [&](const Kernels& k, StreamView v, const Pointers& p) {
                k.scale_by_position({.x = p[0],
                                     .position = i32(p[1]),
                                     .rows = rows,
                                     .width = width,
                                     .stride = stride,
                                     .slope = 0.3f,
                                     .period = 8,
                                     .dtype = t},
                                    v);
              },
              Want::kNear);
        }
      }
    }
  }
}

constexpr Activation kActivations[] = {Activation::kSilu, Activation::kGeluTanh, Activation::kRelu2,
                                       Activation::kRelu};

struct GatedCase {
  DType t;
  Activation activation;
  int64_t rows, ffn;
};

// Arrays: gate_up, dh, h.
void check_gated(const GatedCase& c, const Arrays& arrays) {
  SCOPED_TRACE(name("gated", c.t, {static_cast<int64_t>(c.activation), c.rows, c.ffn}));
  check(
      arrays,
      [&](const Kernels& k, StreamView v, const Pointers& p) {
        k.gated_forward({.gate_up = p[0],
                         .out = p[2],
                         .rows = c.rows,
                         .ffn = c.ffn,
                         .activation = c.activation,
                         .dtype = c.t},
                        v);
        k.gated_backward({.gate_up = p[0],
                          .dh = p[1],
                          .rows = c.rows,
                          .ffn = c.ffn,
                          .activation = c.activation,
                          .dtype = c.t},
                         v);
      },
      Want::kNear, 1e-4);
}

void check_aligned_or_not(const GatedCase& c) {
  for (int shifted : {-1, 0, 1, 2}) {  // the array that is not aligned
    SCOPED_TRACE("shifted " + std::to_string(shifted));
    const auto at = [&](int i) { return int64_t{i == shifted ? 1 + c.ffn % 3 : 0}; };
    const int64_t n = c.rows * c.ffn;
    check_gated(c, {with(noise(c.t, 2 * n, 1, 3, at(0)), {60, -60, 0., -0., 1e-40, -1e-40}, 29),
                    noise(c.t, n, 2, 1, at(1)), zeros(c.t, n, at(2))});
  }
}

TEST_F(GpuKernels, Swiglu) {
  for (DType t : kBoth) {
    for (int64_t ffn : {1, 2, 3, 4, 7, 8, 9, 16, 255, 256, 257, 1024, 1028, 2048, 2056, 5000}) {
      for (int64_t rows : {0, 1, 3}) check_aligned_or_not({t, Activation::kSilu, rows, ffn});
    }
  }
}

TEST_F(GpuKernels, OtherGates) {
  for (DType t : kBoth) {
    for (Activation activation : {Activation::kGeluTanh, Activation::kRelu2}) {
      for (int64_t ffn : {1, 3, 4, 7, 8, 257, 1028, 2056}) check_aligned_or_not({t, activation, 3, ffn});
    }
  }
}

// What the two exps do with huge arguments (the CPU's is clamped); -inf gives NaN, as torch does.
void check_huge(Activation activation, const std::vector<double>& gates) {
  for (DType t : kBoth) {
    for (double g : gates) {
      SCOPED_TRACE("gate " + std::to_string(g));
      Array gate = noise(t, 16, 1);
      gate.values.set(3, g);
      check_gated({t, activation, 1, 8}, {gate, noise(t, 8, 2), zeros(t, 8)});
    }
  }
}

TEST_F(GpuKernels, SwigluOfHugeGates) {
  check_huge(Activation::kSilu,
             {-88., -89., -100., -120., -1e4, -1e30, 88., 89., 100., 1e4, 1e30, kInf, -kInf, kNotANumber});
}

// gelu_tanh's exponential ends at -9.9. Left of it nothing may be left of its slope, which has a cube in it.
TEST_F(GpuKernels, OtherHugeGates) {
  for (Activation activation : {Activation::kGeluTanh, Activation::kRelu2}) {
    check_huge(activation, {-5., -9.8, -9.9, -10., -88., -1e4, -1e10, -1e12, -1e18, -1e30, 9.9, 88., 1e4,
                            1e12, 1e30, kInf, -kInf, kNotANumber});
  }
}

TEST_F(GpuKernels, Activation) {
  for (DType t : kBoth) {
    for (Activation activation : kActivations) {
      for (int64_t n : {0, 1, 3, 4, 8, 63, 1024, 2048, 2052, 2056, 10000}) {
        for (int shifted : {-1, 0, 1, 2}) {
          SCOPED_TRACE(name("activation", t, {static_cast<int64_t>(activation), n, shifted}));
          const auto at = [&](int i) { return int64_t{i == shifted ? 1 + n % 3 : 0}; };
          const Array x = with(noise(t, n, 1, 3, at(0)), {60, -60, 0., -0., 1e-40, kInf, -kInf}, 29);
          check(
              {x, noise(t, n, 2, 1, at(1)), zeros(t, n, at(2))},
              [&](const Kernels& k, StreamView v, const Pointers& p) {
                k.activation_forward(
                    {.x = p[0], .out = p[2], .elements = n, .activation = activation, .dtype = t}, v);
                k.activation_backward(
                    {.x = p[0], .dh = p[1], .elements = n, .activation = activation, .dtype = t}, v);
              },
              Want::kNear, 1e-4);
        }
      }
    }
  }
}

TEST_F(GpuKernels, CapLogits) {
  for (DType t : kBoth) {
    for (int64_t rows : {0, 3}) {
      for (int64_t columns : {1, 3, 4, 8, 255, 1024, 2048, 2049, 4104}) {
        for (int64_t pad : {0, 3, 8}) {
          for (float cap : {0.f, 30.f}) {
            SCOPED_TRACE(name("cap", t, {rows, columns, pad, static_cast<int64_t>(cap)}));
            const int64_t stride = columns + pad;
            check(
                {with(noise(t, rows * stride, 1, 40, pad), {kInf, -kInf, kNotANumber, 1e4, 0., -0., 1e-6},
                      31)},
                [&](const Kernels& k, StreamView v, const Pointers& p) {
                  k.cap_logits({.logits = p[0],
                                .rows = rows,
                                .columns = columns,
                                .stride = stride,
                                .scale = 0.7f,
                                .cap = cap,
                                .dtype = t},
                               v);
                },
                Want::kNear, 1e-9);
          }
        }
      }
    }
  }
}

// Of logits below the cap; capping them here would let a bf16 fall the other way, which e^x does not forgive.
TEST_F(GpuKernels, SoftmaxGradientOfCappedLogits) {
  for (DType t : kBoth) {
    for (int64_t columns : {1, 8, 257, 2048, 8200}) {
      for (int64_t pad : {0, 3}) {
        SCOPED_TRACE(name("softmax", t, {columns, pad}));
        const int64_t rows = 3, stride = columns + pad;
        const auto scalars = [&] { return zeros(DType::kF32, rows); };
        check(
            {with(noise(t, rows * stride, 1, 2), {-12, 12}, 41), numbers({0, 7, 256}), scalars(), scalars(),
             scalars(), noise(DType::kF32, rows, 5)},
            [&](const Kernels& k, StreamView v, const Pointers& p) {
              k.softmax_statistics({.logits = p[0],
                                    .target = i32(p[1]),
                                    .max = f32(p[2]),
                                    .sum = f32(p[3]),
                                    .target_logit = f32(p[4]),
                                    .rows = rows,
                                    .columns = columns,
                                    .stride = stride,
                                    .first_segment = true,
                                    .dtype = t},
                                   v);
              k.softmax_gradient({.logits = p[0],
                                  .target = i32(p[1]),
                                  .max = f32(p[2]),
                                  .sum = f32(p[3]),
                                  .rows = rows,
                                  .columns = columns,
                                  .stride = stride,
                                  .scale = 100,
                                  .weight = pad == 0 ? nullptr : f32(p[5]),
                                  .logit_scale = 0.5f,
                                  .logit_cap = 12,
                                  .dtype = t},
                                 v);
            },
            Want::kNear, 1e-6);
      }
    }
  }
}

TEST_F(GpuKernels, FirstRows) {
  const std::vector<int32_t> start = {0, 3, 4, 4, 7};
  for (DType t : kBoth) {
    for (int64_t width : {1, 3, 8, 127, 128, 129, 577}) {
      for (int64_t documents : {0, 1, 4}) {
        SCOPED_TRACE(name("first rows", t, {width, documents}));
        const int64_t stride = width + 3;
        check(
            {noise(t, 8 * stride, 1), noise(DType::kF32, 2 * width, 2), numbers(start)},
            [&](const Kernels& k, StreamView v, const Pointers& p) {
              k.take_first_rows({.x = p[0],
                                 .start = i32(p[2]),
                                 .sums = f32(p[1]),
                                 .first = 1,
                                 .documents = documents,
                                 .rows = 2,
                                 .width = width,
                                 .stride = stride,
                                 .dtype = t},
                                v);
            },
            Want::kBits);
      }
    }
  }
}

}  // namespace
}  // namespace lm
