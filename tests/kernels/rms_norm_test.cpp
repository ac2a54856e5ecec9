// RMSNorm against fp64 written from its definition, and its backward pass against finite differences.
#include "tests/kernels/support.h"

namespace lm {
namespace {

struct Shape {
  int64_t rows, groups, width, padding;  // padding: elements between rows
  bool residual;
};

const Shape kShapes[] = {{1, 1, 1, 0, false},    {5, 1, 3, 0, true},     {70, 1, 64, 0, true},
                         {130, 1, 577, 0, true}, {65, 3, 64, 32, false}, {3, 2, 17, 5, false},
                         {2, 1, 2048, 0, true}};
constexpr double kEps = 1e-5;

double reference_rstd(const std::vector<double>& x) {
  double squares = 0;
  for (double v : x) squares += v * v;
  return 1 / std::sqrt(squares / static_cast<double>(x.size()) + kEps);
}

void check_forward(const Shape& s, DType dtype) {
  SCOPED_TRACE(dtype_text(dtype) + " width " + std::to_string(s.width));
  const int64_t stride = s.groups * s.width + s.padding;
  const Values x = Values::random(dtype, s.rows * stride, 1), weight = Values::random(dtype, s.width, 2);
  const Values residual = Values::random(dtype, s.rows * stride, 3, 2);
  const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
    Values out(dtype, x.size()), sum(dtype, x.size()), rstd(DType::kF32, s.rows * s.groups);
    k.rms_norm_forward({.x = x.data(),
                        .residual = s.residual ? residual.data() : nullptr,
                        .weight = weight.data(),
                        .sum = s.residual ? sum.data() : nullptr,
                        .out = out.data(),
                        .rstd = static_cast<float*>(rstd.data()),
                        .rows = s.rows,
                        .groups = s.groups,
                        .width = s.width,
                        .x_stride = stride,
                        .out_stride = stride,
                        .eps = static_cast<float>(kEps),
                        .dtype = dtype},
                       stream);
    return Outputs{out, sum, rstd};
  });
  std::vector<double> out(static_cast<size_t>(x.size())), sum(out.size()),
      rstd(static_cast<size_t>(s.rows * s.groups));
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t g = 0; g < s.groups; ++g) {
      std::vector<double> row;
      for (int64_t j = 0; j < s.width; ++j) {
        const int64_t i = r * stride + g * s.width + j;
        row.push_back(s.residual ? x.rounded(x[i] + residual[i]) : x[i]);
        if (s.residual) sum[static_cast<size_t>(i)] = row.back();
      }
      const double scale = reference_rstd(row);
      rstd[static_cast<size_t>(r * s.groups + g)] = scale;
      for (int64_t j = 0; j < s.width; ++j) {
        out[static_cast<size_t>(r * stride + g * s.width + j)] =
            weight[j] * x.rounded(row[static_cast<size_t>(j)] * scale);
      }
    }
  }
  expect_near(got[0], out, relative_bound(dtype) * 2, absolute_bound(dtype), "out");
  expect_near(got[1], sum, 1e-7, 0, "sum");
  expect_near(got[2], rstd, 4e-6, 0, "rstd");
}

TEST(RmsNorm, ForwardIsItsDefinition) {
  for (const Shape& s : kShapes) {
    check_forward(s, DType::kF32);
    check_forward(s, DType::kBF16);
  }
}

// dx and dweight for the loss sum(dy * out), in fp64 from the derivative of the definition.
struct Gradients {
  std::vector<double> dx, dweight;
};
Gradients reference_backward(const Shape& s, const Values& dy, const Values& x, const Values& weight,
                             const Values* dresidual) {
  const int64_t stride = s.groups * s.width + s.padding;
  Gradients g{std::vector<double>(static_cast<size_t>(x.size())),
              std::vector<double>(static_cast<size_t>(s.width))};
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t group = 0; group < s.groups; ++group) {
      const int64_t first = r * stride + group * s.width;
      std::vector<double> row;
      for (int64_t j = 0; j < s.width; ++j) row.push_back(x[first + j]);
      const double scale = reference_rstd(row);
      double mean = 0;
      for (int64_t j = 0; j < s.width; ++j) {
        mean += weight[j] * dy[first + j] * x[first + j] * scale / static_cast<double>(s.width);
      }
      for (int64_t j = 0; j < s.width; ++j) {
        const double n = x[first + j] * scale;
        g.dx[static_cast<size_t>(first + j)] = scale * (weight[j] * dy[first + j] - n * mean) +
                                               (dresidual != nullptr ? (*dresidual)[r * s.width + j] : 0);
        g.dweight[static_cast<size_t>(j)] += dy[first + j] * x.rounded(n);
      }
    }
  }
  return g;
}

Outputs run_backward(const Shape& s, const Values& dy, const Values& x, const Values& weight,
                     const Values* dresidual, bool frozen) {
  const int64_t stride = s.groups * s.width + s.padding;
  Values rstd(DType::kF32, s.rows * s.groups);
  for (int64_t i = 0; i < rstd.size(); ++i) {
    std::vector<double> row;
    for (int64_t j = 0; j < s.width; ++j)
      row.push_back(x[i / s.groups * stride + i % s.groups * s.width + j]);
    rstd.set(i, reference_rstd(row));
  }
  return same_everywhere([&](const Kernels& k, StreamView stream) {
    Values dx = dy;  // in place, as the model calls it
    Values dweight(DType::kF32, s.width), partial(DType::kF32, (s.rows + 63) / 64 * s.width);
    k.rms_norm_backward({.dy = dx.data(),
                         .x = x.data(),
                         .weight = weight.data(),
                         .rstd = static_cast<const float*>(rstd.data()),
                         .dresidual = dresidual != nullptr ? dresidual->data() : nullptr,
                         .dx = dx.data(),
                         .dweight = frozen ? nullptr : static_cast<float*>(dweight.data()),
                         .partial = frozen ? nullptr : static_cast<float*>(partial.data()),
                         .rows = s.rows,
                         .groups = s.groups,
                         .width = s.width,
                         .dy_stride = stride,
                         .x_stride = stride,
                         .dx_stride = stride,
                         .dtype = x.dtype()},
                        stream);
    return Outputs{dx, dweight};
  });
}

TEST(RmsNorm, BackwardIsTheDerivativeOfTheDefinition) {
  for (const Shape& s : kShapes) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(dtype_text(dtype) + " width " + std::to_string(s.width));
      const int64_t n = s.rows * (s.groups * s.width + s.padding);
      const Values x = Values::random(dtype, n, 4), dy = Values::random(dtype, n, 5);
      const Values weight = Values::random(dtype, s.width, 6), dresidual = Values::random(dtype, n, 7);
      const Values* extra = s.residual ? &dresidual : nullptr;
      Gradients want = reference_backward(s, dy, x, weight, extra);
      const Outputs got = run_backward(s, dy, x, weight, extra, false);
      if (s.padding > 0) {  // the gap between rows is nobody's
        for (int64_t i = 0; i < n; ++i) {
          if (i % (n / s.rows) >= s.groups * s.width) want.dx[static_cast<size_t>(i)] = dy[i];
        }
      }
      expect_near(got[0], want.dx, relative_bound(dtype), absolute_bound(dtype) * 10, "dx");
      // A flipped rounding of one n moves the sum by 2^-8 |dy n|.
      expect_near(got[1], want.dweight, 2e-5, dtype == DType::kBF16 ? 0.02 : 2e-5, "dweight");
      const Outputs frozen = run_backward(s, dy, x, weight, extra, true);
      EXPECT_TRUE(frozen[0] == got[0]) << "a frozen weight must not change dx";
    }
  }
}

TEST(RmsNorm, BackwardAgreesWithFiniteDifferences) {
  const Shape s{4, 2, 19, 0, false};
  Values x = Values::random(DType::kF32, 4 * 38, 8);
  const Values dy = Values::random(DType::kF32, x.size(), 9),
               weight = Values::random(DType::kF32, s.width, 10);
  const auto loss = [&](int64_t changed, double by, int64_t changed_weight, double weight_by) {
    double sum = 0;
    for (int64_t v = 0; v < s.rows * s.groups; ++v) {
      std::vector<double> row;
      for (int64_t j = 0; j < s.width; ++j) {
        const int64_t i = v * s.width + j;
        row.push_back(x[i] + (i == changed ? by : 0));
      }
      const double scale = reference_rstd(row);
      for (int64_t j = 0; j < s.width; ++j) {
        sum += dy[v * s.width + j] * row[static_cast<size_t>(j)] * scale *
               (weight[j] + (j == changed_weight ? weight_by : 0));
      }
    }
    return sum;
  };
  const double h = 1e-5;
  std::vector<double> dx, dweight;
  for (int64_t i = 0; i < x.size(); ++i) dx.push_back((loss(i, h, -1, 0) - loss(i, -h, -1, 0)) / (2 * h));
  for (int64_t j = 0; j < s.width; ++j) dweight.push_back((loss(-1, 0, j, h) - loss(-1, 0, j, -h)) / (2 * h));
  const Outputs got = run_backward(s, dy, x, weight, nullptr, false);
  expect_near(got[0], dx, 1e-5, 1e-5, "dx");
  expect_near(got[1], dweight, 1e-5, 1e-5, "dweight");
}

}  // namespace
}  // namespace lm
