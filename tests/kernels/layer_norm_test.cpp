// LayerNorm against fp64 written from its definition, bit for bit against scalars in the documented order,
// and its backward pass against finite differences.
#include "kernels/counting.h"
#include "tests/kernels/norm_reference.h"

namespace lm {
namespace {

struct Shape {
  int64_t rows, width, padding;  // padding: elements between rows
  bool residual, offset, bias;
  int64_t stride() const { return width + padding; }
};

const Shape kShapes[] = {{1, 1, 0, false, false, true},    {5, 3, 0, true, true, true},
                         {70, 64, 0, true, false, false},  {130, 577, 0, true, false, true},
                         {65, 64, 32, false, true, true},  {3, 17, 5, false, true, false},
                         {2, 2048, 0, false, false, true}, {193, 33, 0, false, false, true}};
constexpr double kEps = 1e-5;

std::string text_of(const Shape& s, DType dtype) {
  return dtype_text(dtype) + ", " + std::to_string(s.rows) + " rows of " + std::to_string(s.width) +
         (s.offset ? ", offset" : "") + (s.bias ? ", bias" : "");
}

struct Moments {
  double mean = 0, rstd = 0;
};
Moments moments_of(const std::vector<double>& x) {
  Moments m;
  for (double v : x) m.mean += v / static_cast<double>(x.size());
  double squares = 0;
  for (double v : x) squares += (v - m.mean) * (v - m.mean);
  m.rstd = 1 / std::sqrt(squares / static_cast<double>(x.size()) + kEps);
  return m;
}

std::vector<double> row_of(const Values& x, int64_t first, int64_t width) {
  std::vector<double> row;
  for (int64_t j = 0; j < width; ++j) row.push_back(x[first + j]);
  return row;
}

// A row's mean in fp32 and in the order of the CPU's kernels.
float mean_of(const std::vector<double>& row) {
  std::vector<float> x;
  for (double v : row) x.push_back(static_cast<float>(v));
  return sum_of_lanes(x) / static_cast<float>(row.size());
}
float rstd_of(const std::vector<double>& row, float mean) {
  std::vector<float> squares;
  for (double v : row) {
    const float d = static_cast<float>(v) - mean;
    squares.push_back(d * d);
  }
  return 1 / std::sqrt(sum_of_lanes(squares) / static_cast<float>(row.size()) + static_cast<float>(kEps));
}

// out, sum, rstd.
Outputs run_forward(const Shape& s, const Values& x, const Values& weight, const Values& bias,
                    const Values& residual) {
  return same_everywhere([&](const Kernels& k, StreamView stream) {
    Values out(x.dtype(), x.size()), sum(x.dtype(), x.size()), rstd(DType::kF32, s.rows);
    k.layer_norm_forward({.x = x.data(),
                          .residual = s.residual ? residual.data() : nullptr,
                          .weight = weight.data(),
                          .bias = s.bias ? bias.data() : nullptr,
                          .sum = s.residual ? sum.data() : nullptr,
                          .out = out.data(),
                          .rstd = static_cast<float*>(rstd.data()),
                          .rows = s.rows,
                          .width = s.width,
                          .x_stride = s.stride(),
                          .out_stride = s.stride(),
                          .eps = static_cast<float>(kEps),
                          .offset = s.offset,
                          .dtype = x.dtype()},
                         stream);
    return Outputs{out, sum, rstd};
  });
}

void check_forward(const Shape& s, DType dtype) {
  SCOPED_TRACE(text_of(s, dtype));
  const int64_t n = s.rows * s.stride();
  const Values x = Values::random(dtype, n, 1), weight = Values::random(dtype, s.width, 2),
               bias = Values::random(dtype, s.width, 3), residual = Values::random(dtype, n, 4, 2);
  const Outputs got = run_forward(s, x, weight, bias, residual);
  std::vector<double> out(static_cast<size_t>(n)), sum(out.size()), rstd;
  Values bits(dtype, n), rstd_bits(DType::kF32, s.rows);
  for (int64_t r = 0; r < s.rows; ++r) {
    const int64_t first = r * s.stride();
    std::vector<double> row = row_of(x, first, s.width);
    if (s.residual) {
      for (int64_t j = 0; j < s.width; ++j) {
        row[static_cast<size_t>(j)] = x.rounded(x[first + j] + residual[first + j]);
        sum[static_cast<size_t>(first + j)] = row[static_cast<size_t>(j)];
      }
    }
    const Moments m = moments_of(row);
    rstd.push_back(m.rstd);
    const std::vector<double> stored = s.residual ? row_of(got[1], first, s.width) : row;
    const float mean = mean_of(stored), scale = rstd_of(stored, mean);
    rstd_bits.set(r, scale);
    for (int64_t j = 0; j < s.width; ++j) {
      const double w = weight[j] + (s.offset ? 1 : 0), b = s.bias ? bias[j] : 0;
      out[static_cast<size_t>(first + j)] = w * ((row[static_cast<size_t>(j)] - m.mean) * m.rstd) + b;
      const float normal = (static_cast<float>(stored[static_cast<size_t>(j)]) - mean) * scale;
      const float factor = s.offset ? 1 + static_cast<float>(weight[j]) : static_cast<float>(weight[j]);
      float y = factor * normal;
      if (s.bias) y += static_cast<float>(bias[j]);
      bits.set(first + j, y);
    }
  }
  expect_near(got[0], out, relative_bound(dtype), 1e-5, "out");
  expect_near(got[1], sum, 1e-7, 0, "sum");
  expect_near(got[2], rstd, 4e-6, 0, "rstd");
  EXPECT_TRUE(got[2] == rstd_bits) << "bits of rstd";
  EXPECT_TRUE(got[0] == bits) << "out is not rounded once, behind the bias";
}

TEST(LayerNorm, ForwardIsItsDefinition) {
  for (const Shape& s : kShapes) {
    check_forward(s, DType::kF32);
    check_forward(s, DType::kBF16);
  }
}

// The mean of squares less the square of the mean has no digit left here.
TEST(LayerNorm, VarianceOfRowsFarFromZeroIsExact) {
  const Shape s{4, 333, 0, false, false, true};
  Values x = Values::random(DType::kF32, s.rows * s.width, 5);
  for (int64_t i = 0; i < x.size(); ++i) x.set(i, x[i] + 10000);
  const Values weight = Values::random(DType::kF32, s.width, 6),
               bias = Values::random(DType::kF32, s.width, 7);
  const Outputs got = run_forward(s, x, weight, bias, x);
  std::vector<double> rstd;
  for (int64_t r = 0; r < s.rows; ++r) rstd.push_back(moments_of(row_of(x, r * s.width, s.width)).rstd);
  expect_near(got[2], rstd, 1e-5, 0, "rstd");
}

TEST(LayerNorm, OutAndSumMayBeTheirInput) {
  const Shape s{70, 33, 0, true, true, true};
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const int64_t n = s.rows * s.width;
    const Values x = Values::random(dtype, n, 1), weight = Values::random(dtype, s.width, 2),
                 bias = Values::random(dtype, s.width, 3), residual = Values::random(dtype, n, 4, 2);
    for (const bool residual_too : {false, true}) {
      Shape shape = s;
      shape.residual = residual_too;
      const Outputs apart = run_forward(shape, x, weight, bias, residual);
      const Outputs in_place = same_everywhere([&](const Kernels& k, StreamView stream) {
        Values memory = x, out(dtype, n);
        k.layer_norm_forward({.x = memory.data(),
                              .residual = residual_too ? residual.data() : nullptr,
                              .weight = weight.data(),
                              .bias = bias.data(),
                              .sum = residual_too ? memory.data() : nullptr,
                              .out = residual_too ? out.data() : memory.data(),
                              .rows = s.rows,
                              .width = s.width,
                              .x_stride = s.width,
                              .out_stride = s.width,
                              .eps = static_cast<float>(kEps),
                              .offset = s.offset,
                              .dtype = dtype},
                             stream);
        return Outputs{memory, out};
      });
      EXPECT_TRUE(in_place[residual_too ? 1 : 0] == apart[0]);
      if (residual_too) {
        EXPECT_TRUE(in_place[0] == apart[1]);
      }
    }
  }
}

// dx, dweight and dbias for the loss sum(dy * out), in fp64 from the derivative of the definition.
struct Gradients {
  std::vector<double> dx, dweight, dbias;
};
Gradients reference_backward(const Shape& s, const Values& dy, const Values& x, const Values& weight,
                             const Values* dresidual) {
  Gradients g{std::vector<double>(static_cast<size_t>(x.size())),
              std::vector<double>(static_cast<size_t>(s.width)),
              std::vector<double>(static_cast<size_t>(s.width))};
  const auto width = static_cast<double>(s.width);
  for (int64_t r = 0; r < s.rows; ++r) {
    const int64_t first = r * s.stride();
    const Moments m = moments_of(row_of(x, first, s.width));
    std::vector<double> d, n;
    double mean = 0, product_mean = 0;
    for (int64_t j = 0; j < s.width; ++j) {
      d.push_back((weight[j] + (s.offset ? 1 : 0)) * dy[first + j]);
      n.push_back((x[first + j] - m.mean) * m.rstd);
      mean += d.back() / width;
      product_mean += d.back() * n.back() / width;
      g.dweight[static_cast<size_t>(j)] += dy[first + j] * n.back();
      g.dbias[static_cast<size_t>(j)] += dy[first + j];
    }
    for (int64_t j = 0; j < s.width; ++j) {
      const auto at = static_cast<size_t>(j);
      g.dx[static_cast<size_t>(first + j)] = m.rstd * (d[at] - mean - n[at] * product_mean) +
                                             (dresidual != nullptr ? (*dresidual)[r * s.width + j] : 0);
    }
  }
  return g;
}

Values reference_rstds(const Shape& s, const Values& x) {
  Values rstd(DType::kF32, s.rows);
  for (int64_t r = 0; r < s.rows; ++r) rstd.set(r, moments_of(row_of(x, r * s.stride(), s.width)).rstd);
  return rstd;
}

struct Wanted {
  bool weight = true, bias = true;
};

// dx, dweight, dbias; gradients that nobody wants stay 7.
Outputs run_backward(const Shape& s, const Values& dy, const Values& x, const Values& weight,
                     const Values* dresidual, Wanted wanted) {
  const Values rstd = reference_rstds(s, x);
  return same_everywhere([&](const Kernels& k, StreamView stream) {
    Values dx = dy;  // in place, as the model calls it
    Values dweight(DType::kF32, s.width), dbias(DType::kF32, s.width),
        partial(DType::kF32, 2 * ((s.rows + kRowBlock - 1) / kRowBlock) * s.width);
    for (int64_t j = 0; j < s.width; ++j) dweight.set(j, 7), dbias.set(j, 7);
    for (int64_t i = 0; i < partial.size(); ++i) partial.set(i, 1e9);  // what lay there must not matter
    k.layer_norm_backward(
        {.dy = dx.data(),
         .x = x.data(),
         .weight = weight.data(),
         .rstd = static_cast<const float*>(rstd.data()),
         .dresidual = dresidual != nullptr ? dresidual->data() : nullptr,
         .dx = dx.data(),
         .dweight = wanted.weight ? static_cast<float*>(dweight.data()) : nullptr,
         .dbias = wanted.bias ? static_cast<float*>(dbias.data()) : nullptr,
         .partial = wanted.weight || wanted.bias ? static_cast<float*>(partial.data()) : nullptr,
         .rows = s.rows,
         .width = s.width,
         .dy_stride = s.stride(),
         .x_stride = s.stride(),
         .dx_stride = s.stride(),
         .offset = s.offset,
         .dtype = x.dtype()},
        stream);
    return Outputs{dx, dweight, dbias};
  });
}

// The bits of the gradients of weight and bias, from their order.
void expect_sums(const Shape& s, const Values& dy, const Values& x, const Outputs& got) {
  const Values rstd = reference_rstds(s, x);
  std::vector<float> means;
  for (int64_t r = 0; r < s.rows; ++r) means.push_back(mean_of(row_of(x, r * s.stride(), s.width)));
  Values dweight(DType::kF32, s.width), dbias(DType::kF32, s.width);
  for (int64_t j = 0; j < s.width; ++j) {
    const auto gradient = [&](int64_t r) { return static_cast<float>(dy[r * s.stride() + j]); };
    dbias.set(j, sum_of_rows(s.rows, gradient));
    dweight.set(j, sum_of_rows(s.rows, [&](int64_t r) {
                  const float d = static_cast<float>(x[r * s.stride() + j]) - means[static_cast<size_t>(r)];
                  return gradient(r) * (d * static_cast<float>(rstd[r]));
                }));
  }
  EXPECT_TRUE(got[1] == dweight) << "bits of dweight";
  EXPECT_TRUE(got[2] == dbias) << "bits of dbias";
}

TEST(LayerNorm, BackwardIsTheDerivativeOfTheDefinition) {
  for (const Shape& s : kShapes) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(text_of(s, dtype));
      const int64_t n = s.rows * s.stride();
      const Values x = Values::random(dtype, n, 4), dy = Values::random(dtype, n, 5);
      const Values weight = Values::random(dtype, s.width, 6), dresidual = Values::random(dtype, n, 7);
      const Values* extra = s.residual ? &dresidual : nullptr;
      Gradients want = reference_backward(s, dy, x, weight, extra);
      const Outputs got = run_backward(s, dy, x, weight, extra, {});
      for (int64_t i = 0; i < n; ++i) {  // the gap between rows is nobody's
        if (i % s.stride() >= s.width) want.dx[static_cast<size_t>(i)] = dy[i];
      }
      expect_near(got[0], want.dx, relative_bound(dtype), dtype == DType::kBF16 ? 1e-4 : 4e-5, "dx");
      expect_near(got[1], want.dweight, 2e-5, 5e-5, "dweight");
      expect_near(got[2], want.dbias, 2e-5, 2e-5, "dbias");
      expect_sums(s, dy, x, got);
    }
  }
}

// With a weight of 1 a row's output is its normalised input, and so is the weight's gradient where dy is 1.
// Far from 0 another order of the sum shows in the mean.
TEST(LayerNorm, BackwardHasTheMeanOfForward) {
  const Shape s{1, 333, 0, false, false, false};
  Values x = Values::random(DType::kF32, s.width, 8), ones(DType::kF32, s.width);
  for (int64_t j = 0; j < s.width; ++j) x.set(j, 10000 + x[j]), ones.set(j, 1);
  const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
    Values out(DType::kF32, s.width), rstd(DType::kF32, 1), dx(DType::kF32, s.width),
        dweight(DType::kF32, s.width), partial(DType::kF32, 2 * s.width);
    k.layer_norm_forward({.x = x.data(),
                          .weight = ones.data(),
                          .out = out.data(),
                          .rstd = static_cast<float*>(rstd.data()),
                          .rows = 1,
                          .width = s.width,
                          .x_stride = s.width,
                          .out_stride = s.width,
                          .eps = static_cast<float>(kEps)},
                         stream);
    k.layer_norm_backward({.dy = ones.data(),
                           .x = x.data(),
                           .weight = ones.data(),
                           .rstd = static_cast<const float*>(rstd.data()),
                           .dx = dx.data(),
                           .dweight = static_cast<float*>(dweight.data()),
                           .partial = static_cast<float*>(partial.data()),
                           .rows = 1,
                           .width = s.width,
                           .dy_stride = s.width,
                           .x_stride = s.width,
                           .dx_stride = s.width},
                          stream);
    return Outputs{out, dweight};
  });
  EXPECT_TRUE(got[0] == got[1]);
}

// A gradient that nobody wants is not written, and the others have the same bits without it.
TEST(LayerNorm, WeightAndBiasMayBeFrozenEachAlone) {
  const Shape s{130, 65, 3, false, true, true};
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const int64_t n = s.rows * s.stride();
    const Values x = Values::random(dtype, n, 4), dy = Values::random(dtype, n, 5),
                 weight = Values::random(dtype, s.width, 6);
    const Outputs both = run_backward(s, dy, x, weight, nullptr, {});
    for (const Wanted wanted : {Wanted{true, false}, Wanted{false, true}, Wanted{false, false}}) {
      SCOPED_TRACE(text_of(s, dtype) + (wanted.weight ? ", weight" : "") + (wanted.bias ? ", bias" : ""));
      const Outputs got = run_backward(s, dy, x, weight, nullptr, wanted);
      EXPECT_TRUE(got[0] == both[0]);
      EXPECT_TRUE(wanted.weight ? got[1] == both[1] : got[1][0] == 7 && got[1][s.width - 1] == 7);
      EXPECT_TRUE(wanted.bias ? got[2] == both[2] : got[2][0] == 7 && got[2][s.width - 1] == 7);
    }
  }
}

TEST(LayerNorm, GradientsOfNoRowsAreZero) {
  const Shape s{0, 5, 0, false, false, true};
  const Values none(DType::kF32, 0), weight = Values::random(DType::kF32, s.width, 6);
  const Outputs got = run_backward(s, none, none, weight, nullptr, {});
  expect_near(got[1], std::vector<double>(5), 0, 0, "dweight");
  expect_near(got[2], std::vector<double>(5), 0, 0, "dbias");
}

TEST(LayerNorm, BackwardAgreesWithFiniteDifferences) {
  const Shape s{5, 19, 0, false, true, true};
  const Values x = Values::random(DType::kF32, s.rows * s.width, 8),
               dy = Values::random(DType::kF32, x.size(), 9),
               weight = Values::random(DType::kF32, s.width, 10);
  // The loss where element `at` of x, then of the weight, then of the bias has changed by `by`.
  const auto loss = [&](int64_t at, double by) {
    double sum = 0;
    for (int64_t r = 0; r < s.rows; ++r) {
      std::vector<double> row = row_of(x, r * s.width, s.width);
      if (at / s.width == r && at < x.size()) row[static_cast<size_t>(at % s.width)] += by;
      const Moments m = moments_of(row);
      for (int64_t j = 0; j < s.width; ++j) {
        const double w = 1 + weight[j] + (at == x.size() + j ? by : 0);
        const double b = at == x.size() + s.width + j ? by : 0;
        sum += dy[r * s.width + j] * (w * (row[static_cast<size_t>(j)] - m.mean) * m.rstd + b);
      }
    }
    return sum;
  };
  const double h = 1e-5;
  std::vector<double> all;
  for (int64_t i = 0; i < x.size() + 2 * s.width; ++i) all.push_back((loss(i, h) - loss(i, -h)) / (2 * h));
  const Outputs got = run_backward(s, dy, x, weight, nullptr, {});
  const auto part = [&](int64_t first, int64_t n) {
    return std::vector<double>(all.begin() + first, all.begin() + first + n);
  };
  expect_near(got[0], part(0, x.size()), 1e-5, 1e-5, "dx");
  expect_near(got[1], part(x.size(), s.width), 1e-5, 1e-5, "dweight");
  expect_near(got[2], part(x.size() + s.width, s.width), 1e-5, 1e-5, "dbias");
}

TEST(LayerNorm, CountsItsArrays) {
  const auto bytes = [](const void* extra) {
    Counts forward, backward;
    const Kernels& k = counting_kernels(DeviceType::kCpu);
    k.layer_norm_forward({.residual = extra, .rows = 3, .width = 5, .dtype = DType::kBF16},
                         counting_stream(forward, DeviceType::kCpu, 1));
    k.layer_norm_backward({.dresidual = extra, .rows = 3, .width = 5, .dtype = DType::kBF16},
                          counting_stream(backward, DeviceType::kCpu, 1));
    return std::pair(forward.cost.pass_bytes, backward.cost.pass_bytes);
  };
  const int something = 0;
  EXPECT_EQ(bytes(nullptr), std::pair(2 * 3 * 5 * 2.0, 3 * 3 * 5 * 2.0));
  EXPECT_EQ(bytes(&something), std::pair(4 * 3 * 5 * 2.0, 4 * 3 * 5 * 2.0));
}

}  // namespace
}  // namespace lm
