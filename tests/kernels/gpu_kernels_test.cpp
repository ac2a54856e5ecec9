// Every GPU launcher against its CPU twin, which the other tests hold against fp64. Kernels whose bits are
// fixed by the contract (accumulation, dropout, norms, AdamW) must be equal bit for bit; the others within
// the rounding of their reductions and exp. Skips where there is no device.
#include "base/philox.h"

#include "tests/kernels/support.h"

namespace lm {
namespace {

using Pointers = std::vector<void*>;
using Body = std::function<void(const Kernels&, StreamView, const Pointers&)>;

class GpuKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  }
};

// Runs `body` on host and device copies of `arrays`. The device runs twice: the second result must be the
// first.
std::pair<Outputs, Outputs> run_both(const Outputs& arrays, const Body& body) {
  Outputs host = arrays;
  Pointers pointers;
  for (Values& v : host) pointers.push_back(v.data());
  body(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 2}, pointers);

  Stream stream(DeviceType::kCuda);
  std::vector<Outputs> results;
  for (int turn = 0; turn < 2; ++turn) {
    Outputs device = arrays;
    Pointers memory;
    for (Values& v : device) {
      const int64_t bytes = v.size() * static_cast<int64_t>(dtype_size(v.dtype()));
      memory.push_back(cuda_allocate(std::max<int64_t>(bytes, 1)));
      copy_bytes(memory.back(), v.data(), bytes, stream.view());
    }
    body(kernels(DeviceType::kCuda), stream.view(), memory);
    for (size_t i = 0; i < device.size(); ++i) {
      copy_bytes(device[i].data(), memory[i],
                 device[i].size() * static_cast<int64_t>(dtype_size(device[i].dtype())), stream.view());
    }
    stream.synchronize();
    for (void* m : memory) cuda_free(m);
    results.push_back(std::move(device));
  }
  for (size_t i = 0; i < arrays.size(); ++i)
    EXPECT_TRUE(results[0][i] == results[1][i]) << "array " << i << " varies";
  return {std::move(host), std::move(results[0])};
}

void expect_same_bits(const Outputs& arrays, const Body& body) {
  const auto [host, device] = run_both(arrays, body);
  for (size_t i = 0; i < host.size(); ++i) EXPECT_TRUE(host[i] == device[i]) << "array " << i;
}

void expect_close(const Outputs& arrays, const Body& body, double absolute) {
  const auto [host, device] = run_both(arrays, body);
  for (size_t i = 0; i < host.size(); ++i) {
    std::vector<double> want;
    for (int64_t k = 0; k < host[i].size(); ++k) want.push_back(host[i][k]);
    expect_near(device[i], want, 2 * relative_bound(host[i].dtype()) + 1e-5, absolute,
                "array " + std::to_string(i));
  }
}

// Indices travel in fp32 arrays as bit patterns.
Values indices(const std::vector<int32_t>& numbers) {
  Values values(DType::kF32, static_cast<int64_t>(numbers.size()));
  std::memcpy(values.data(), numbers.data(), numbers.size() * 4);
  return values;
}
float* f32(void* p) {
  return static_cast<float*>(p);
}
const int32_t* i32(void* p) {
  return static_cast<const int32_t*>(p);
}

constexpr DType kBoth[] = {DType::kF32, DType::kBF16};

TEST_F(GpuKernels, RmsNormAgrees) {
  for (DType t : kBoth) {
    for (const auto& [rows, groups, width] : {std::array<int64_t, 3>{1, 1, 1},
                                              {70, 1, 3},
                                              {130, 3, 64},
                                              {65, 1, 577},
                                              {66, 1, 2048},
                                              {3, 1, 1031}}) {
      SCOPED_TRACE(dtype_text(t) + " width " + std::to_string(width));
      const int64_t stride = groups * width, n = rows * stride;
      const auto r = [&](int64_t size, uint32_t seed) { return Values::random(t, size, seed); };
      expect_close(
          {r(n, 1), r(n, 2), r(width, 3), Values(t, n), Values(t, n), Values(DType::kF32, rows * groups)},
          [&, rows = rows, groups = groups, width = width](const Kernels& k, StreamView s,
                                                           const Pointers& p) {
            const bool add = groups == 1;
            k.rms_norm_forward({.x = p[0],
                                .residual = add ? p[1] : nullptr,
                                .weight = p[2],
                                .sum = add ? p[3] : nullptr,
                                .out = p[4],
                                .rstd = f32(p[5]),
                                .rows = rows,
                                .groups = groups,
                                .width = width,
                                .x_stride = stride,
                                .out_stride = stride,
                                .eps = 1e-5f,
                                .dtype = t},
                               s);
          },
          1e-5);
      expect_close(
          {r(n, 4), r(n, 5), r(width, 6), r(n, 7), Values::random(DType::kF32, rows * groups, 8),
           Values(DType::kF32, width), Values(DType::kF32, (rows + 63) / 64 * width)},
          [&, rows = rows, groups = groups, width = width](const Kernels& k, StreamView s,
                                                           const Pointers& p) {
            k.rms_norm_backward({.dy = p[0],
                                 .x = p[1],
                                 .weight = p[2],
                                 .rstd = f32(p[4]),
                                 .dresidual = groups == 1 ? p[3] : nullptr,
                                 .dx = p[0],
                                 .dweight = f32(p[5]),
                                 .partial = f32(p[6]),
                                 .rows = rows,
                                 .groups = groups,
                                 .width = width,
                                 .dy_stride = stride,
                                 .x_stride = stride,
                                 .dx_stride = stride,
                                 .dtype = t},
                                s);
          },
          t == DType::kBF16 ? 0.02 : 1e-3);
    }
  }
}

TEST_F(GpuKernels, RopeAgrees) {
  const int64_t rows = 37, heads = 3, positions = 40;
  std::vector<int32_t> position;
  for (int32_t i = 0; i < rows; ++i) position.push_back(i * 7 % 40);
  for (DType t : kBoth) {
    for (int64_t d : {2, 6, 128}) {
      for (bool inverse : {false, true}) {
        expect_close(
            {Values::random(t, rows * (heads * d + 8), 1), Values::random(DType::kF32, positions * d / 2, 2),
             Values::random(DType::kF32, positions * d / 2, 3), indices(position)},
            [&](const Kernels& k, StreamView s, const Pointers& p) {
              k.rope({.x = p[0],
                      .cos = f32(p[1]),
                      .sin = f32(p[2]),
                      .position = i32(p[3]),
                      .rows = rows,
                      .heads = heads,
                      .head_dim = d,
                      .x_stride = heads * d + 8,
                      .inverse = inverse,
                      .dtype = t},
                     s);
            },
            1e-5);
      }
    }
  }
}

TEST_F(GpuKernels, SwigluAgrees) {
  for (DType t : kBoth) {
    for (int64_t ffn : {1, 3, 64, 577}) {
      const int64_t rows = 21;
      expect_close(
          {Values::random(t, rows * 2 * ffn, 1, 3), Values::random(t, rows * ffn, 2), Values(t, rows * ffn)},
          [&](const Kernels& k, StreamView s, const Pointers& p) {
            k.swiglu_forward({.gate_up = p[0], .out = p[2], .rows = rows, .ffn = ffn, .dtype = t}, s);
            k.swiglu_backward({.gate_up = p[0], .dh = p[1], .rows = rows, .ffn = ffn, .dtype = t}, s);
          },
          1e-4);
    }
  }
}

TEST_F(GpuKernels, SoftmaxAgrees) {
  for (DType t : kBoth) {
    for (const auto& [rows, columns, segment] :
         {std::array<int64_t, 3>{1, 1, 1}, {9, 577, 577}, {300, 96, 64}, {3, 20000, 8192}}) {
      SCOPED_TRACE(dtype_text(t) + " columns " + std::to_string(columns));
      std::vector<int32_t> target;
      for (int64_t r = 0; r < rows; ++r) target.push_back(static_cast<int32_t>(r * 37 % columns));
      const Values scalars(DType::kF32, rows);
      expect_close(
          {Values::random(t, rows * columns, 1, 4), indices(target), scalars, scalars, scalars,
           Values(DType::kF32, 2)},
          [&, rows = rows, columns = columns, segment = segment](const Kernels& k, StreamView s,
                                                                 const Pointers& p) {
            const int64_t size = static_cast<int64_t>(dtype_size(t));
            for (int64_t first = 0; first < columns; first += segment) {
              k.softmax_statistics({.logits = static_cast<char*>(p[0]) + first * size,
                                    .target = i32(p[1]),
                                    .max = f32(p[2]),
                                    .sum = f32(p[3]),
                                    .target_logit = f32(p[4]),
                                    .rows = rows,
                                    .columns = std::min(segment, columns - first),
                                    .stride = columns,
                                    .first_column = first,
                                    .first_segment = first == 0,
                                    .dtype = t},
                                   s);
            }
            for (int64_t first = 0; first < columns; first += segment) {
              k.softmax_gradient({.logits = static_cast<char*>(p[0]) + first * size,
                                  .target = i32(p[1]),
                                  .max = f32(p[2]),
                                  .sum = f32(p[3]),
                                  .rows = rows,
                                  .columns = std::min(segment, columns - first),
                                  .stride = columns,
                                  .first_column = first,
                                  .scale = 0.25f,
                                  .dtype = t},
                                 s);
            }
          },
          1e-6);
    }
  }
}

TEST_F(GpuKernels, SoftmaxLossAddsInRowOrder) {
  const int64_t rows = 1000;
  Values sum = Values::random(DType::kF32, rows, 2);
  for (int64_t i = 0; i < rows; ++i) sum.set(i, 1 + std::abs(sum[i]));
  const auto [host, device] = run_both({Values::random(DType::kF32, rows, 1), sum,
                                        Values::random(DType::kF32, rows, 3), Values(DType::kF32, 2)},
                                       [&](const Kernels& k, StreamView s, const Pointers& p) {
                                         k.softmax_loss({.max = f32(p[0]),
                                                         .sum = f32(p[1]),
                                                         .target_logit = f32(p[2]),
                                                         .total = static_cast<double*>(p[3]),
                                                         .rows = rows},
                                                        s);
                                       });
  double want = 0, got = 0;
  std::memcpy(&want, host[3].data(), 8);
  std::memcpy(&got, device[3].data(), 8);
  EXPECT_NE(want, 0);
  EXPECT_NEAR(got, want, 1e-6 * static_cast<double>(rows));  // logf differs in the last place
}

TEST_F(GpuKernels, RowsAreEqualBitForBit) {
  const std::vector<int32_t> token = {3, 1, 3, 0, 7, 3, 1}, order = {3, 1, 6, 0, 2, 5, 4},
                             start = {0, 1, 3, 6, 7}, row = {0, 1, 3, 7};
  for (DType t : kBoth) {
    for (int64_t width : {1, 3, 64, 577}) {
      expect_same_bits(
          {Values::random(t, 8 * width, 1), Values::random(t, 8 * width, 2), Values(t, 7 * width),
           Values::random(DType::kF32, 4 * width, 3), indices(token), indices(order), indices(start),
           indices(row)},
          [&](const Kernels& k, StreamView s, const Pointers& p) {
            k.gather_rows(
                {.table = p[0], .index = i32(p[4]), .out = p[2], .rows = 7, .width = width, .dtype = t}, s);
            k.sum_rows({.source = p[1],
                        .order = i32(p[5]),
                        .start = i32(p[6]),
                        .sums = f32(p[3]),
                        .slots = 4,
                        .width = width,
                        .dtype = t},
                       s);
            k.add_rows({.sums = f32(p[3]),
                        .row = i32(p[7]),
                        .gradient = p[0],
                        .slots = 4,
                        .width = width,
                        .gradient_dtype = t},
                       s);
            k.scatter_rows({.source = p[0],
                            .index = i32(p[7]),
                            .out = p[1],
                            .rows = 4,
                            .out_rows = 7 + 1,
                            .width = width,
                            .dtype = t},
                           s);
          });
    }
  }
}

TEST_F(GpuKernels, SumsAndBiasAreEqualBitForBit) {
  for (DType t : kBoth) {
    for (DType from : kBoth) {
      for (int64_t n : {1, 63, 1000, 70001}) {
        for (bool overwrite : {false, true}) {
          expect_same_bits({Values::random(t, n, 1), Values::random(from, n, 2)},
                           [&](const Kernels& k, StreamView s, const Pointers& p) {
                             k.accumulate({.to = p[0],
                                           .from = p[1],
                                           .elements = n,
                                           .to_dtype = t,
                                           .from_dtype = from,
                                           .overwrite = overwrite},
                                          s);
                           });
        }
      }
    }
    for (int64_t rows : {1, 64, 130}) {
      const int64_t width = 77, stride = 80;
      expect_same_bits(
          {Values::random(t, rows * stride, 3), Values(DType::kF32, width),
           Values(DType::kF32, (rows + 63) / 64 * width), Values::random(t, width, 4)},
          [&](const Kernels& k, StreamView s, const Pointers& p) {
            k.sum_columns({.x = p[0],
                           .sums = f32(p[1]),
                           .partial = f32(p[2]),
                           .rows = rows,
                           .width = width,
                           .stride = stride,
                           .dtype = t},
                          s);
            k.add_bias({.x = p[0], .bias = p[3], .rows = rows, .width = width, .stride = stride, .dtype = t},
                       s);
          });
    }
  }
}

TEST_F(GpuKernels, DropoutIsEqualBitForBit) {
  const int64_t rows = 30;
  std::vector<int32_t> sample, position;
  for (int32_t r = 0; r < rows; ++r) sample.push_back(r / 7), position.push_back(r % 7);
  for (DType t : kBoth) {
    for (int64_t width : {1, 3, 64, 577}) {
      for (bool accumulate : {false, true}) {
        expect_same_bits({Values::random(t, rows * width, 1), Values::random(t, rows * width, 2),
                          indices(sample), indices(position)},
                         [&](const Kernels& k, StreamView s, const Pointers& p) {
                           k.dropout({.x = p[0],
                                      .out = p[1],
                                      .sample = i32(p[2]),
                                      .position = i32(p[3]),
                                      .rows = rows,
                                      .width = width,
                                      .key = 77,
                                      .p = 0.3f,
                                      .accumulate = accumulate,
                                      .dtype = t},
                                     s);
                         });
      }
    }
  }
}

TEST_F(GpuKernels, GranuleNormsAreEqualBitForBit) {
  for (DType t : kBoth) {
    Values x = Values::random(t, 5 * 4096, 1, 1e-3);
    x.set(2 * 4096 + 17, std::nan(""));
    x.set(3 * 4096 + 4095, INFINITY);
    expect_same_bits({x, Values(DType::kF32, 10)}, [&](const Kernels& k, StreamView s, const Pointers& p) {
      k.granule_norms({.x = p[0], .sums = static_cast<double*>(p[1]), .granules = 5, .dtype = t}, s);
    });
  }
}

TEST_F(GpuKernels, AdamWIsEqualBitForBit) {
  using Master = AdamW::Master;
  for (Master mode : {Master::kWeight, Master::kSplit, Master::kF32, Master::kStochastic}) {
    const DType weight = mode == Master::kWeight ? DType::kF32 : DType::kBF16;
    const DType master = mode == Master::kF32 ? DType::kF32 : DType::kBF16;
    for (DType gradient : kBoth) {
      for (int64_t n : {1, 1000, 40003}) {
        SCOPED_TRACE("mode " + std::to_string(static_cast<int>(mode)) + " n " + std::to_string(n));
        Values g = Values::random(gradient, n, 1), m = Values::random(DType::kF32, n, 2, 0.1);
        Values v = Values::random(DType::kF32, n, 3, 0.01);
        for (int64_t i = 0; i < n; ++i) v.set(i, std::abs(v[i]));
        const double specials[] = {NAN, INFINITY, -INFINITY, 0, -0., 1e-42, 3.4e38};
        for (int64_t i = 0; i < n; i += 11) g.set(i, specials[i / 11 % 7]);
        expect_same_bits({g, Values::random(weight, n, 4), Values::random(master, n, 5), m, v},
                         [&](const Kernels& k, StreamView s, const Pointers& p) {
                           for (int t = 1; t <= 3; ++t) {
                             k.adamw({.gradient = p[0],
                                      .weight = p[1],
                                      .master = p[2],
                                      .m = f32(p[3]),
                                      .v = f32(p[4]),
                                      .elements = n,
                                      .gradient_dtype = gradient,
                                      .weight_dtype = weight,
                                      .mode = mode,
                                      .gradient_scale = 0.7f,
                                      .one_minus_beta1 = 0.1f,
                                      .beta2 = 0.999f,
                                      .one_minus_beta2 = 0.001f,
                                      .step_size = 1e-3f,
                                      .rsqrt_correction2 = 1.5f,
                                      .eps = 1e-8f,
                                      .decay = 0.99999f,
                                      .rounding_key = 5,
                                      .first_index = 4096},
                                     s);
                           }
                         });
      }
    }
  }
}

}  // namespace
}  // namespace lm
