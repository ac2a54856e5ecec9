// RMSNorm against fp64 written from its definition, bit for bit against scalars that round where each form
// does, and its backward pass against finite differences.
#include "kernels/counting.h"
#include "tests/kernels/norm_reference.h"

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

// Whether such rows can be added to others.
bool can_add(const Shape& s) {
  return s.groups == 1 && s.padding == 0;
}

// What forward reads, and its output for it.
struct Inputs {
  Inputs(const Shape& shape, DType dtype)
      : s(shape),
        stride(s.groups * s.width + s.padding),
        x(Values::random(dtype, s.rows * stride, 1)),
        weight(Values::random(dtype, s.width, 2)),
        residual(Values::random(dtype, s.rows * stride, 3, 2)),
        add_to(Values::random(dtype, s.rows * stride, 4)) {}
  // out, sum, rstd; `in_place`: out is add_to.
  Outputs forward(const RmsForm& f, bool in_place = false) const {
    return same_everywhere([&](const Kernels& k, StreamView stream) {
      Values out = in_place ? add_to : Values(x.dtype(), x.size());
      Values sum(x.dtype(), x.size()), rstd(DType::kF32, s.rows * s.groups);
      k.rms_norm_forward({.x = x.data(),
                          .residual = s.residual ? residual.data() : nullptr,
                          .weight = f.weighted ? weight.data() : nullptr,
                          .sum = s.residual ? sum.data() : nullptr,
                          .add_to = !f.added   ? nullptr
                                    : in_place ? out.data()
                                               : add_to.data(),
                          .out = out.data(),
                          .rstd = static_cast<float*>(rstd.data()),
                          .rows = s.rows,
                          .groups = s.groups,
                          .width = s.width,
                          .x_stride = stride,
                          .out_stride = stride,
                          .eps = static_cast<float>(kEps),
                          .factor = f.factor,
                          .form = f.form,
                          .dtype = x.dtype()},
                         stream);
      return Outputs{out, sum, rstd};
    });
  }
  Shape s;
  int64_t stride;
  Values x, weight, residual, add_to;
};

double definition(const RmsForm& f, const Values& like, double n, double weight) {
  if (!f.weighted) return n;
  switch (f.form) {
    case WeightForm::kAfterRounding:
      return weight * like.rounded(n);
    case WeightForm::kBeforeRounding:
      return weight * n;
    case WeightForm::kOffset:
      return (1 + weight) * n;
  }
  return 0;
}

void check_forward(const Shape& s, const RmsForm& f, DType dtype) {
  SCOPED_TRACE(dtype_text(dtype) + " width " + std::to_string(s.width) + ", " + form_text(f));
  const Inputs in(s, dtype);
  const Outputs got = in.forward(f);
  std::vector<double> out(static_cast<size_t>(in.x.size())), sum(out.size()),
      rstd(static_cast<size_t>(s.rows * s.groups));
  Values bits(dtype, in.x.size());
  for (int64_t r = 0; r < s.rows; ++r) {
    for (int64_t g = 0; g < s.groups; ++g) {
      std::vector<double> row;
      for (int64_t j = 0; j < s.width; ++j) {
        const int64_t i = r * in.stride + g * s.width + j;
        row.push_back(s.residual ? in.x.rounded(in.x[i] + in.residual[i]) : in.x[i]);
        if (s.residual) sum[static_cast<size_t>(i)] = row.back();
      }
      const double scale = reference_rstd(row);
      rstd[static_cast<size_t>(r * s.groups + g)] = scale;
      for (int64_t j = 0; j < s.width; ++j) {
        const int64_t i = r * in.stride + g * s.width + j;
        const double value = row[static_cast<size_t>(j)];
        const double y = definition(f, in.x, value * scale, in.weight[j]);
        out[static_cast<size_t>(i)] = f.added ? in.add_to[i] + f.factor * y : y;
        const double stored = s.residual ? got[1][i] : in.x[i];
        const float n = static_cast<float>(stored) * static_cast<float>(got[2][r * s.groups + g]);
        bits.set(i,
                 rms_output(f, dtype, n, static_cast<float>(in.weight[j]), static_cast<float>(in.add_to[i])));
      }
    }
  }
  // A rounding of y by the other neighbour stays when y is added to its opposite.
  const double absolute = !f.added ? absolute_bound(dtype) : dtype == DType::kBF16 ? 0.2 : 2e-5;
  expect_near(got[0], out, relative_bound(dtype) * 2, absolute, "out");
  expect_near(got[1], sum, 1e-7, 0, "sum");
  expect_near(got[2], rstd, 4e-6, 0, "rstd");
  EXPECT_TRUE(got[0] == bits) << "out is not rounded where its form says";
  if (f.added) {
    EXPECT_TRUE(in.forward(f, true)[0] == bits) << "in place";
  }
}

TEST(RmsNorm, ForwardIsItsDefinitionInEveryForm) {
  for (const Shape& s : kShapes) {
    for (const RmsForm& f : kRmsForms) {
      if (f.added && !can_add(s)) continue;
      check_forward(s, f, DType::kF32);
      check_forward(s, f, DType::kBF16);
    }
  }
}

// Else the bits above would show nothing.
TEST(RmsNorm, FormsDifferInBf16ByTheirRounding) {
  const Inputs in({70, 1, 64, 0, false}, DType::kBF16);
  const Outputs twice = in.forward({});
  EXPECT_FALSE(twice[0] == in.forward({.form = WeightForm::kBeforeRounding})[0]);
  const Values added = in.forward({.form = WeightForm::kBeforeRounding, .added = true, .factor = 0.3f})[0];
  int64_t others = 0;
  for (int64_t i = 0; i < added.size(); ++i) {
    const double y = in.weight[i % 64] * in.x[i] * twice[2][i / 64];
    others += added[i] == nearest_bf16(in.add_to[i] + 0.3f * y) ? 0 : 1;
  }
  EXPECT_GT(others, 0) << "rounded once, behind the sum";
}

TEST(RmsNorm, CountsOneMoreReadWhereItAdds) {
  const auto bytes = [](const void* residual, const void* add_to) {
    Counts counts;
    counting_kernels(DeviceType::kCpu)
        .rms_norm_forward(
            {.residual = residual, .add_to = add_to, .rows = 3, .width = 5, .dtype = DType::kBF16},
            counting_stream(counts, DeviceType::kCpu, 1));
    return counts.cost.pass_bytes;
  };
  const int something = 0;
  EXPECT_EQ(bytes(nullptr, nullptr), 2 * 3 * 5 * 2);
  EXPECT_EQ(bytes(nullptr, &something), 3 * 3 * 5 * 2);
  EXPECT_EQ(bytes(&something, nullptr), 4 * 3 * 5 * 2);
}

// dx and dweight for the loss sum(dy * out), in fp64 from the derivative of the definition.
struct Gradients {
  std::vector<double> dx, dweight;
};
Gradients reference_backward(const Shape& s, const RmsForm& f, const Values& dy, const Values& x,
                             const Values& weight, const Values* dresidual) {
  const int64_t stride = s.groups * s.width + s.padding;
  const auto factor = [&](int64_t j) {
    if (!f.weighted) return 1.0;
    return f.form == WeightForm::kOffset ? 1 + weight[j] : weight[j];
  };
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
        mean += factor(j) * dy[first + j] * x[first + j] * scale / static_cast<double>(s.width);
      }
      for (int64_t j = 0; j < s.width; ++j) {
        const double n = x[first + j] * scale;
        g.dx[static_cast<size_t>(first + j)] = scale * (factor(j) * dy[first + j] - n * mean) +
                                               (dresidual != nullptr ? (*dresidual)[r * s.width + j] : 0);
        g.dweight[static_cast<size_t>(j)] +=
            dy[first + j] * (f.form == WeightForm::kAfterRounding ? x.rounded(n) : n);
      }
    }
  }
  return g;
}

Values reference_rstds(const Shape& s, const Values& x) {
  const int64_t stride = s.groups * s.width + s.padding;
  Values rstd(DType::kF32, s.rows * s.groups);
  for (int64_t i = 0; i < rstd.size(); ++i) {
    std::vector<double> row;
    for (int64_t j = 0; j < s.width; ++j)
      row.push_back(x[i / s.groups * stride + i % s.groups * s.width + j]);
    rstd.set(i, reference_rstd(row));
  }
  return rstd;
}

// The bits of dweight, from its order.
Values weight_gradient(const Shape& s, const RmsForm& f, const Values& dy, const Values& x,
                       const Values& rstd) {
  const int64_t stride = s.groups * s.width + s.padding;
  Values out(DType::kF32, s.width);
  for (int64_t j = 0; j < s.width; ++j) {
    float sum = 0;
    for (int64_t begin = 0; begin < s.rows; begin += kRowBlock) {
      float block = 0;
      for (int64_t v = begin * s.groups; v < std::min(s.rows, begin + kRowBlock) * s.groups; ++v) {
        const int64_t i = v / s.groups * stride + v % s.groups * s.width + j;
        const float n = static_cast<float>(x[i]) * static_cast<float>(rstd[v]);
        block += static_cast<float>(dy[i]) * rms_input(f, x.dtype(), n);
      }
      sum = begin == 0 ? block : sum + block;
    }
    out.set(j, sum);
  }
  return out;
}

Outputs run_backward(const Shape& s, const RmsForm& f, const Values& dy, const Values& x,
                     const Values& weight, const Values* dresidual, bool frozen) {
  const int64_t stride = s.groups * s.width + s.padding;
  const Values rstd = reference_rstds(s, x);
  return same_everywhere([&](const Kernels& k, StreamView stream) {
    Values dx = dy;  // in place, as the model calls it
    Values dweight(DType::kF32, s.width), partial(DType::kF32, (s.rows + 63) / 64 * s.width);
    k.rms_norm_backward({.dy = dx.data(),
                         .x = x.data(),
                         .weight = f.weighted ? weight.data() : nullptr,
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
                         .form = f.form,
                         .dtype = x.dtype()},
                        stream);
    return Outputs{dx, dweight};
  });
}

void check_backward(const Shape& s, const RmsForm& f, DType dtype) {
  SCOPED_TRACE(dtype_text(dtype) + " width " + std::to_string(s.width) + ", " + form_text(f));
  const int64_t n = s.rows * (s.groups * s.width + s.padding);
  const Values x = Values::random(dtype, n, 4), dy = Values::random(dtype, n, 5);
  const Values weight = Values::random(dtype, s.width, 6), dresidual = Values::random(dtype, n, 7);
  const Values* extra = s.residual ? &dresidual : nullptr;
  Gradients want = reference_backward(s, f, dy, x, weight, extra);
  const Outputs frozen = run_backward(s, f, dy, x, weight, extra, true);
  if (s.padding > 0) {  // the gap between rows is nobody's
    for (int64_t i = 0; i < n; ++i) {
      if (i % (n / s.rows) >= s.groups * s.width) want.dx[static_cast<size_t>(i)] = dy[i];
    }
  }
  expect_near(frozen[0], want.dx, relative_bound(dtype), absolute_bound(dtype) * 10, "dx");
  if (!f.weighted) return;
  const Outputs got = run_backward(s, f, dy, x, weight, extra, false);
  EXPECT_TRUE(frozen[0] == got[0]) << "a frozen weight must not change dx";
  // A flipped rounding of one n moves the sum by 2^-8 |dy n|.
  const bool flips = dtype == DType::kBF16 && f.form == WeightForm::kAfterRounding;
  expect_near(got[1], want.dweight, 2e-5, flips ? 0.02 : 2e-5, "dweight");
  EXPECT_TRUE(got[1] == weight_gradient(s, f, dy, x, reference_rstds(s, x))) << "bits of dweight";
}

TEST(RmsNorm, BackwardIsTheDerivativeOfTheDefinitionInEveryForm) {
  for (const Shape& s : kShapes) {
    for (const RmsForm& f : kRmsForms) {
      if (f.added) continue;  // the gradient of a sum is each summand's
      check_backward(s, f, DType::kF32);
      check_backward(s, f, DType::kBF16);
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
  const Outputs got = run_backward(s, {}, dy, x, weight, nullptr, false);
  expect_near(got[0], dx, 1e-5, 1e-5, "dx");
  expect_near(got[1], dweight, 1e-5, 1e-5, "dweight");
}

}  // namespace
}  // namespace lm
