// RoPE and the scale by position against fp64.
#include <complex>

#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr DType kBoth[] = {DType::kF32, DType::kBF16};

TEST(Rope, RotatesSplitHalvesByThePositionsAngleAndBack) {
  for (DType dtype : kBoth) {
    for (int64_t head_dim : {2, 6, 64, 128}) {
      SCOPED_TRACE(dtype_text(dtype) + " head_dim " + std::to_string(head_dim));
      const int64_t rows = 150, heads = 3, half = head_dim / 2, stride = heads * head_dim + 10,
                    positions = 50;
      const Values x = Values::random(dtype, rows * stride, 1);
      Values cos(DType::kF32, positions * half), sin(DType::kF32, positions * half);
      for (int64_t p = 0; p < positions; ++p) {
        for (int64_t i = 0; i < half; ++i) {
          const double angle = static_cast<double>(p) *
                               std::pow(1e4, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
          cos.set(p * half + i, std::cos(angle));
          sin.set(p * half + i, std::sin(angle));
        }
      }
      std::vector<int32_t> position;
      for (int32_t r = 0; r < rows; ++r) position.push_back((r * 7) % 50);
      for (bool inverse : {false, true}) {
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          Values y = x;
          k.rope({.x = y.data(),
                  .cos = static_cast<float*>(cos.data()),
                  .sin = static_cast<float*>(sin.data()),
                  .position = position.data(),
                  .rows = rows,
                  .heads = heads,
                  .head_dim = head_dim,
                  .x_stride = stride,
                  .inverse = inverse,
                  .dtype = dtype},
                 stream);
          return Outputs{y};
        });
        std::vector<double> want;
        for (int64_t i = 0; i < x.size(); ++i) want.push_back(x[i]);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t h = 0; h < heads; ++h) {
            for (int64_t i = 0; i < half; ++i) {
              const int64_t a = r * stride + h * head_dim + i, b = a + half;
              const int64_t t = position[static_cast<size_t>(r)] * half + i;
              const double s = inverse ? -sin[t] : sin[t];
              want[static_cast<size_t>(a)] = x[a] * cos[t] - x[b] * s;
              want[static_cast<size_t>(b)] = x[b] * cos[t] + x[a] * s;
            }
          }
        }
        expect_near(got[0], want, relative_bound(dtype), absolute_bound(dtype),
                    inverse ? "inverse" : "forward");
      }
    }
  }
}

// The forward here knows no table and no formula of the kernel: it turns complex numbers a + ib by an angle.
TEST(Rope, InverseAgreesWithFiniteDifferencesOfTheForward) {
  const int64_t rows = 5, heads = 2, head_dim = 6, half = 3, positions = 40;
  const Values x = Values::random(DType::kF32, rows * heads * head_dim, 21),
               dy = Values::random(DType::kF32, x.size(), 22);
  const std::vector<int32_t> position = {0, 3, 3, 17, 39};
  const auto angle = [](int64_t p, int64_t i) {
    return static_cast<double>(p) * std::pow(1e4, -static_cast<double>(i) / 3);
  };
  const auto loss = [&](int64_t changed, double by) {
    const auto at = [&](int64_t i) { return x[i] + (i == changed ? by : 0); };
    double sum = 0;
    for (int64_t head = 0; head < rows * heads; ++head) {
      for (int64_t i = 0; i < half; ++i) {
        const int64_t a = head * head_dim + i, b = a + half;
        const std::complex<double> turned =
            std::complex<double>(at(a), at(b)) *
            std::polar(1.0, angle(position[static_cast<size_t>(head / heads)], i));
        sum += dy[a] * turned.real() + dy[b] * turned.imag();
      }
    }
    return sum;
  };
  Values cos(DType::kF32, positions * half), sin(DType::kF32, positions * half);
  for (int64_t k = 0; k < positions * half; ++k) {
    cos.set(k, std::cos(angle(k / half, k % half)));
    sin.set(k, std::sin(angle(k / half, k % half)));
  }
  const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
    Values dx = dy;
    k.rope({.x = dx.data(),
            .cos = static_cast<float*>(cos.data()),
            .sin = static_cast<float*>(sin.data()),
            .position = position.data(),
            .rows = rows,
            .heads = heads,
            .head_dim = head_dim,
            .x_stride = heads * head_dim,
            .inverse = true,
            .dtype = DType::kF32},
           stream);
    return Outputs{dx};
  });
  const double h = 1e-3;  // the rotation is linear: only rounding limits the difference
  std::vector<double> want;
  for (int64_t i = 0; i < x.size(); ++i) want.push_back((loss(i, h) - loss(i, -h)) / (2 * h));
  expect_near(got[0], want, 1e-5, 1e-6, "dx");
}

// What a head turns: the first `dim` features (0: all), in pairs of halves or of neighbours, by complex
// numbers of magnitude `factor`.
struct Turn {
  int64_t head_dim, dim;
  bool neighbours;
  double factor = 1;

  int64_t turned() const { return dim > 0 ? dim : head_dim; }
  int64_t pairs() const { return turned() / 2; }
  int64_t first(int64_t i) const { return neighbours ? 2 * i : i; }
  int64_t second(int64_t i) const { return neighbours ? 2 * i + 1 : pairs() + i; }
  std::complex<double> of(int64_t position, int64_t i) const {
    const double power = -static_cast<double>(i) / static_cast<double>(pairs());
    return std::polar(factor, static_cast<double>(position) * std::pow(1e4, power));
  }
  std::string text() const {
    return std::to_string(turned()) + " of " + std::to_string(head_dim) + (neighbours ? ", neighbours" : "");
  }
};
// Pairs in whole vectors of 16, in a part of one, and in both.
constexpr Turn kTurns[] = {
    {64, 16, false}, {7, 4, false, 1.25},  {128, 96, false, 1.19}, {70, 66, false},       {2, 0, true},
    {6, 0, true},    {128, 0, true, 1.25}, {10, 6, true, 1.19},    {70, 66, true, 1.346}, {192, 64, true}};

// `x` [positions of `position`, heads, head_dim] rotated, with 3 elements behind each row.
struct Rotation {
  const Turn& turn;
  std::vector<int32_t> position;
  int64_t heads = 1;

  int64_t rows() const { return std::ssize(position); }
  int64_t stride() const { return heads * turn.head_dim + 3; }
  int64_t at(int64_t row, int64_t head) const { return row * stride() + head * turn.head_dim; }
  Values operator()(const Kernels& k, StreamView stream, Values x, bool inverse) const {
    constexpr int64_t kPositions = 40;
    Values cos(DType::kF32, kPositions * turn.pairs()), sin(DType::kF32, kPositions * turn.pairs());
    for (int64_t i = 0; i < cos.size(); ++i) {
      const std::complex<double> c = turn.of(i / turn.pairs(), i % turn.pairs());
      cos.set(i, c.real()), sin.set(i, c.imag());
    }
    k.rope({.x = x.data(),
            .cos = static_cast<float*>(cos.data()),
            .sin = static_cast<float*>(sin.data()),
            .position = position.data(),
            .rows = rows(),
            .heads = heads,
            .head_dim = turn.head_dim,
            .x_stride = stride(),
            .dim = turn.dim,
            .neighbours = turn.neighbours,
            .inverse = inverse,
            .dtype = x.dtype()},
           stream);
    return x;
  }
};

TEST(Rope, TurnsTheFirstFeaturesInPairsOfHalvesOrNeighbours) {
  for (DType dtype : kBoth) {
    for (const Turn& turn : kTurns) {
      SCOPED_TRACE(dtype_text(dtype) + " " + turn.text());
      Rotation rotation{turn, {}, 2};
      for (int32_t r = 0; r < 131; ++r) rotation.position.push_back(r * 7 % 40);
      const Values x = Values::random(dtype, rotation.rows() * rotation.stride(), 31);
      const Outputs got = same_everywhere(
          [&](const Kernels& k, StreamView stream) { return Outputs{rotation(k, stream, x, false)}; });
      Values others = got[0];  // without what is turned it is x
      std::vector<double> want;
      for (int64_t i = 0; i < x.size(); ++i) want.push_back(x[i]);
      for (int64_t r = 0; r < rotation.rows(); ++r) {
        for (int64_t h = 0; h < rotation.heads; ++h) {
          for (int64_t i = 0; i < turn.pairs(); ++i) {
            const int64_t a = rotation.at(r, h) + turn.first(i), b = rotation.at(r, h) + turn.second(i);
            const std::complex<double> z =
                std::complex<double>(x[a], x[b]) * turn.of(rotation.position[static_cast<size_t>(r)], i);
            want[static_cast<size_t>(a)] = z.real(), want[static_cast<size_t>(b)] = z.imag();
            others.set(a, x[a]), others.set(b, x[b]);
          }
        }
      }
      expect_near(got[0], want, relative_bound(dtype), absolute_bound(dtype), "turned");
      EXPECT_TRUE(others == x) << "what is not turned has changed";
    }
  }
}

// With a factor in the tables, too: then it does not undo the rotation.
TEST(Rope, TheInverseOfEveryKindIsTheGradient) {
  for (const Turn& turn : kTurns) {
    SCOPED_TRACE(turn.text());
    const Rotation rotation{turn, {0, 5, 39}, 2};
    const int64_t n = rotation.rows() * rotation.stride();
    const Values x = Values::random(DType::kF32, n, 32), dy = Values::random(DType::kF32, n, 33);
    const auto loss = [&](int64_t changed, double by) {
      const auto at = [&](int64_t i) { return x[i] + (i == changed ? by : 0); };
      double sum = 0;
      for (int64_t i = 0; i < n; ++i) {
        const bool pad = i % rotation.stride() >= rotation.heads * turn.head_dim;
        if (pad || i % rotation.stride() % turn.head_dim >= turn.turned()) sum += dy[i] * at(i);
      }
      for (int64_t r = 0; r < rotation.rows(); ++r) {
        for (int64_t i = 0; i < rotation.heads * turn.pairs(); ++i) {
          const int64_t first = rotation.at(r, i / turn.pairs()), pair = i % turn.pairs();
          const int64_t a = first + turn.first(pair), b = first + turn.second(pair);
          const std::complex<double> z =
              std::complex<double>(at(a), at(b)) * turn.of(rotation.position[static_cast<size_t>(r)], pair);
          sum += dy[a] * z.real() + dy[b] * z.imag();
        }
      }
      return sum;
    };
    const Outputs got = same_everywhere(
        [&](const Kernels& k, StreamView stream) { return Outputs{rotation(k, stream, dy, true)}; });
    const double h = 1e-3;
    std::vector<double> want;
    for (int64_t i = 0; i < n; ++i) want.push_back((loss(i, h) - loss(i, -h)) / (2 * h));
    expect_near(got[0], want, 1e-5, 2e-6, "dx");
  }
}

TEST(Rope, NeighboursHaveTheBitsOfHalvesInAnotherOrder) {
  for (DType dtype : kBoth) {
    for (const int64_t dim : {2, 6, 66, 128}) {
      const Turn halves{dim, 0, false}, neighbours{dim + 3, dim, true};
      const Rotation one{halves, {3, 0, 39}}, other{neighbours, {3, 0, 39}};
      const Values x = Values::random(dtype, 3 * other.stride(), 34);
      Values in_halves(dtype, 3 * one.stride());
      for (int64_t i = 0; i < 3 * dim; ++i) {
        const int64_t row = i / dim, pair = i % dim / 2;
        in_halves.set(one.at(row, 0) + (i % 2 == 0 ? halves.first(pair) : halves.second(pair)),
                      x[other.at(row, 0) + i % dim]);
      }
      for (CpuLevel level : cpu_levels()) {
        const Values want = one(cpu_kernels(level), {}, in_halves, false),
                     got = other(cpu_kernels(level), {}, x, false);
        for (int64_t i = 0; i < 3 * dim; ++i) {
          const int64_t row = i / dim, pair = i % dim / 2;
          EXPECT_EQ(got[other.at(row, 0) + i % dim],
                    want[one.at(row, 0) + (i % 2 == 0 ? halves.first(pair) : halves.second(pair))]);
        }
      }
    }
  }
}

TEST(ScaleByPosition, RoundsTheFactorThenTheProduct) {
  const std::vector<int32_t> position = {0, 15, 16, 31, 32, 47, 100, 163, 1000, 30000};
  const int64_t rows = std::ssize(position), period = 16;
  const float slope = 0.1f;
  for (DType dtype : kBoth) {
    int64_t seen = 0;  // elements on which the order of rounding shows
    for (int64_t width : {1, 3, 64, 577}) {
      SCOPED_TRACE(dtype_text(dtype) + " width " + std::to_string(width));
      const int64_t stride = width + 5;
      const Values x = Values::random(dtype, rows * stride, 35);
      const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
        Values y = x;
        k.scale_by_position({.x = y.data(),
                             .position = position.data(),
                             .rows = rows,
                             .width = width,
                             .stride = stride,
                             .slope = slope,
                             .period = period,
                             .dtype = dtype},
                            stream);
        return Outputs{y};
      });
      Values want = x;
      for (int64_t r = 0; r < rows; ++r) {
        const auto periods = static_cast<double>(position[static_cast<size_t>(r)] / period);
        const double exact = 1 + static_cast<double>(slope) * std::log(1 + periods);
        for (int64_t j = 0; j < width; ++j) {
          const double v = x[r * stride + j];
          want.set(r * stride + j, v * x.rounded(exact));
          seen += x.rounded(v * exact) != x.rounded(v * x.rounded(exact));
        }
      }
      if (dtype == DType::kBF16) {
        EXPECT_TRUE(got[0] == want);
        continue;
      }
      std::vector<double> near;
      for (int64_t i = 0; i < want.size(); ++i) near.push_back(want[i]);
      expect_near(got[0], near, 1e-6, 0, "scaled");
      for (int64_t i = 0; i < 2 * stride; ++i) EXPECT_EQ(got[0][i], x[i]) << "in the first period";
    }
    EXPECT_EQ(seen > 100, dtype == DType::kBF16);
  }
}

}  // namespace
}  // namespace lm
