// Kernels that compute four vectors at once (wide_lanes.h): each element has the bits that it has in a vector
// of its own, and a sum adds in the order of one vector after the other.
#include <array>
#include <cmath>
#include <cstring>

#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr DType kBoth[] = {DType::kF32, DType::kBF16};
constexpr int64_t kAlone = 16;  // one vector of F32

// Of `from`, elements [first, first + n) of each of `rows` rows of `width`.
Values columns(const Values& from, int64_t rows, int64_t width, int64_t first, int64_t n) {
  Values out(from.dtype(), rows * n);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < n; ++j) out.set(r * n + j, from[r * width + first + j]);
  }
  return out;
}

struct Gated {
  Values h, gradients, h_again;  // gradients: of gate and up, as gate_up lies
};

Gated gated(const Kernels& k, const Values& gate, const Values& up, const Values& dh, int64_t rows,
            Activation activation = Activation::kSilu) {
  const DType dtype = gate.dtype();
  const int64_t ffn = gate.size() / rows;
  Values gate_up(dtype, 2 * gate.size()), h(dtype, gate.size()), d = dh;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < ffn; ++j) {
      gate_up.set(r * 2 * ffn + j, gate[r * ffn + j]);
      gate_up.set((r * 2 + 1) * ffn + j, up[r * ffn + j]);
    }
  }
  const StreamView stream{DeviceType::kCpu, nullptr, 1};
  k.gated_forward({.gate_up = gate_up.data(),
                   .out = h.data(),
                   .rows = rows,
                   .ffn = ffn,
                   .activation = activation,
                   .dtype = dtype},
                  stream);
  k.gated_backward({.gate_up = gate_up.data(),
                    .dh = d.data(),
                    .rows = rows,
                    .ffn = ffn,
                    .activation = activation,
                    .dtype = dtype},
                   stream);
  return {h, gate_up, d};
}

void expect_the_bits_alone(Activation activation) {
  const int64_t rows = 3, ffn = 64 + 2 * kAlone + 5;  // four vectors, single ones, and a part of one
  for (DType dtype : kBoth) {
    for (CpuLevel level : cpu_levels()) {
      SCOPED_TRACE(std::string(cpu_level_name(level)) + " " + dtype_text(dtype));
      const Kernels& k = cpu_kernels(level);
      const Values gate = Values::random(dtype, rows * ffn, 1, 4), up = Values::random(dtype, rows * ffn, 2),
                   dh = Values::random(dtype, rows * ffn, 3);
      const Gated whole = gated(k, gate, up, dh, rows, activation);
      for (int64_t first = 0; first < ffn; first += kAlone) {
        const int64_t n = std::min(kAlone, ffn - first);
        const Gated alone = gated(k, columns(gate, rows, ffn, first, n), columns(up, rows, ffn, first, n),
                                  columns(dh, rows, ffn, first, n), rows, activation);
        EXPECT_TRUE(columns(whole.h, rows, ffn, first, n) == alone.h) << first;
        EXPECT_TRUE(columns(whole.h_again, rows, ffn, first, n) == alone.h_again) << first;
        EXPECT_TRUE(columns(whole.gradients, 2 * rows, ffn, first, n) == alone.gradients) << first;
      }
    }
  }
}

TEST(WideLanes, SwigluGivesEachElementTheBitsThatItHasAlone) {
  expect_the_bits_alone(Activation::kSilu);
}

TEST(WideLanes, OtherActivationsGiveEachElementTheBitsThatItHasAlone) {
  expect_the_bits_alone(Activation::kGeluTanh);
  expect_the_bits_alone(Activation::kRelu2);
  expect_the_bits_alone(Activation::kRelu);
}

// silu(-infinity) is -infinity * 0, which a processor makes with its sign: stored as bf16 it is 0x7FC0, among
// numbers and alone.
TEST(WideLanes, WhatIsNoNumberIsStoredAsTheOneNaN) {
  const int64_t ffn = 64 + 2 * kAlone + 5;
  // In each of four vectors, in a single one, in a part of one.
  const int64_t places[] = {0, 17, 34, 63, 70, ffn - 1};
  for (CpuLevel level : cpu_levels()) {
    SCOPED_TRACE(cpu_level_name(level));
    Values gate = Values::random(DType::kBF16, ffn, 1);
    const Values up = Values::random(DType::kBF16, ffn, 2), dh = Values::random(DType::kBF16, ffn, 3);
    for (int64_t place : places) gate.set(place, -INFINITY);
    const Gated out = gated(cpu_kernels(level), gate, up, dh, 1);
    for (const Values* of : {&out.h, &out.h_again, &out.gradients}) {
      for (int64_t place : places) {
        uint16_t bits = 0;
        std::memcpy(&bits, static_cast<const std::byte*>(of->data()) + place * 2, 2);
        EXPECT_EQ(bits, 0x7FC0) << place;
      }
      EXPECT_TRUE(std::isfinite((*of)[1]));
    }
  }
}

// (exp(x - max - log(sum)) - 0) * 1: with max 0 and sum 1 the exponentials; with a cap times its slope.
Values exponentials(const Kernels& k, Values x, float cap = 0) {
  float max = 0, sum = 1;
  const int32_t target = -1;
  k.softmax_gradient({.logits = x.data(),
                      .target = &target,
                      .max = &max,
                      .sum = &sum,
                      .rows = 1,
                      .columns = x.size(),
                      .stride = x.size(),
                      .scale = 1,
                      .logit_cap = cap,
                      .dtype = x.dtype()},
                     {DeviceType::kCpu, nullptr, 1});
  return x;
}

TEST(WideLanes, SoftmaxGradientGivesEachElementTheBitsThatItHasAlone) {
  const int64_t n = 2 * 64 + kAlone + 3;
  for (DType dtype : kBoth) {
    for (CpuLevel level : cpu_levels()) {
      SCOPED_TRACE(std::string(cpu_level_name(level)) + " " + dtype_text(dtype));
      const Values x = Values::random(dtype, n, 4, 5), whole = exponentials(cpu_kernels(level), x);
      for (int64_t j = 0; j < n; ++j)
        EXPECT_TRUE(columns(whole, 1, n, j, 1) == exponentials(cpu_kernels(level), columns(x, 1, n, j, 1)))
            << j;
    }
  }
}

Values capped(const Kernels& k, Values x) {
  k.cap_logits(
      {.logits = x.data(), .rows = 1, .columns = x.size(), .stride = x.size(), .cap = 3, .dtype = x.dtype()},
      {DeviceType::kCpu, nullptr, 1});
  return x;
}

TEST(WideLanes, CapsGiveEachElementTheBitsThatItHasAlone) {
  const int64_t n = 2 * 64 + kAlone + 3;
  for (DType dtype : kBoth) {
    for (CpuLevel level : cpu_levels()) {
      SCOPED_TRACE(std::string(cpu_level_name(level)) + " " + dtype_text(dtype));
      const Kernels& k = cpu_kernels(level);
      const Values x = Values::random(dtype, n, 4, 3), y = capped(k, x), gradient = exponentials(k, y, 3);
      for (int64_t j = 0; j < n; ++j) {
        const Values alone = capped(k, columns(x, 1, n, j, 1));
        EXPECT_TRUE(columns(y, 1, n, j, 1) == alone) << j;
        EXPECT_TRUE(columns(gradient, 1, n, j, 1) == exponentials(k, alone, 3)) << j;
      }
    }
  }
}

// Lane l of the sum adds elements l, l + 16, l + 32, ...; then the lanes are added by a tree.
TEST(WideLanes, SoftmaxStatisticsAddOneVectorAfterTheOther) {
  const int64_t n = 5 * 64 + 2 * kAlone + 7;
  for (CpuLevel level : cpu_levels()) {
    SCOPED_TRACE(cpu_level_name(level));
    const Kernels& k = cpu_kernels(level);
    Values x = Values::random(DType::kF32, n + 64, 5, 3);  // the kernel may fetch the next row ahead
    float max = 0, sum = 0, chosen = 0;
    const int32_t target = 0;
    k.softmax_statistics({.logits = x.data(),
                          .target = &target,
                          .max = &max,
                          .sum = &sum,
                          .target_logit = &chosen,
                          .rows = 1,
                          .columns = n,
                          .stride = n,
                          .first_segment = true,
                          .dtype = DType::kF32},
                         {DeviceType::kCpu, nullptr, 1});
    Values shifted(DType::kF32, n);
    for (int64_t j = 0; j < n; ++j) shifted.set(j, static_cast<float>(x[j]) - max);
    const Values terms = exponentials(k, shifted);
    std::array<float, kAlone> lane{};
    for (int64_t j = 0; j < n; ++j) lane[static_cast<size_t>(j % kAlone)] += static_cast<float>(terms[j]);
    for (size_t step = kAlone / 2; step > 0; step /= 2) {
      for (size_t l = 0; l < step; ++l) lane[l] += lane[l + step];
    }
    EXPECT_EQ(sum, lane[0]);
  }
}

}  // namespace
}  // namespace lm
