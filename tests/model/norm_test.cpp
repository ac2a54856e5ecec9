// Each kind of norm is its formula, forward and backward, against LibTorch's autograd in fp64; what stands
// behind a mixer is rounded as its single operations round.
#include "model/norm.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "kernels/aten.h"
#include "kernels/library.h"
#include "kernels/runtime.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kRows = 130, kWidth = 48;  // rows: three partial sums
constexpr double kEps = 1e-3;
constexpr NormKind kKinds[] = {NormKind::kRms,        NormKind::kRmsLate, NormKind::kRmsOffset,
                               NormKind::kRmsPlain,   NormKind::kLayer,   NormKind::kLayerOffset,
                               NormKind::kLayerNoBias};

View view(const at::Tensor& x) {
  if (!x.defined()) return {};
  const int64_t columns = x.dim() == 2 ? x.size(1) : 1;
  return {x.data_ptr(), x.scalar_type() == at::kFloat ? DType::kF32 : DType::kBF16, x.size(0), columns,
          columns};
}

struct Fixture {
  explicit Fixture(DType type, NormKind kind, int64_t width = kWidth)
      : dtype(type), norm_spec{.kind = kind, .eps = kEps} {
    at::manual_seed(7);
    x = random({kRows, kWidth}), residual = random({kRows, kWidth});
    dy = random({kRows, kWidth}), dresidual = random({kRows, kWidth});
    if (norm_spec.has_weight()) weight = random({width}), dweight = at::full({width}, 7, at::kFloat);
    if (norm_spec.has_bias()) bias = random({width}), dbias = at::full({width}, 7, at::kFloat);
  }

  at::Tensor random(at::IntArrayRef shape) const {
    return at::randn(shape, at::kFloat).add_(0.3).to(torch_type(dtype));
  }
  at::Tensor empty() const { return at::empty({kRows, kWidth}, torch_type(dtype)); }
  Norm norm() const { return {norm_spec, {view(weight), view(dweight)}, {view(bias), view(dbias)}}; }
  // In fp64, of vectors as long as the weight.
  at::Tensor formula(const at::Tensor& of, const at::Tensor& w, const at::Tensor& b) const {
    at::Tensor n = norm_spec.centred() ? of - of.mean(-1, true) : of;
    n = n * (n.square().mean(-1, true) + kEps).rsqrt();
    if (w.defined()) n = n * (norm_spec.offset() ? w + 1 : w);
    return b.defined() ? n + b : n;
  }
  at::Tensor formula(const at::Tensor& of) const { return formula(exact(of), exact(weight), exact(bias)); }
  static at::Tensor exact(const at::Tensor& t) { return t.defined() ? t.to(at::kDouble) : t; }

  DType dtype;
  NormSpec norm_spec;
  ModelSpec spec = llama_spec({.hidden = kWidth});
  StreamView stream = start_torch(DeviceType::kCpu, 2, true);
  Arena arena{DeviceType::kCpu, int64_t{4} << 20};
  RopeTable rope{spec, 1, dtype, DeviceType::kCpu, stream};
  Uploads uploads;
  Context context{spec,  dtype, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,  uploads};
  at::Tensor x, residual, dy, dresidual, weight, bias, dweight, dbias;
  at::Tensor rstd = at::empty({kRows}, at::kFloat);
};

std::string text_of(NormKind kind) {
  return "kind " + std::to_string(static_cast<int>(kind));
}

void expect_near(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  const at::Tensor exact = want.detach().view_as(got);
  const double apart = got.to(at::kDouble).sub(exact).abs().max().item<double>();
  EXPECT_LE(apart, 1e-5 * (1 + exact.abs().max().item<double>())) << what;
}

TEST(Norm, EachKindIsItsFormulaForward) {
  for (NormKind kind : kKinds) {
    SCOPED_TRACE(text_of(kind));
    const Fixture f(DType::kF32, kind);
    const at::Tensor out = f.empty(), sum = f.empty();
    norm_forward(f.context, f.norm(), view(f.x), view(out), view(f.rstd));
    expect_near(out, f.formula(f.x), "norm");
    norm_forward_residual(f.context, f.norm(),
                          {view(f.x), view(f.residual), view(sum), view(out), view(f.rstd)});
    EXPECT_TRUE(at::equal(sum, f.x + f.residual));
    expect_near(out, f.formula(f.x + f.residual), "norm of a sum");
    const at::Tensor added = f.exact(f.residual) + 0.5 * f.formula(f.x);
    norm_forward_added(f.context, f.norm(), {view(f.x), view(f.residual), view(out), view(f.rstd), 0.5f});
    expect_near(out, added, "added");
    const at::Tensor in_place = f.residual.clone();
    norm_forward_added(f.context, f.norm(), {view(f.x), view(in_place), view(in_place), {}, 0.5f});
    EXPECT_TRUE(at::equal(in_place, out)) << "in place";
    // Recomputation wants rstd alone.
    const at::Tensor rstd = at::empty_like(f.rstd);
    norm_forward_added(f.context, f.norm(), {view(f.x), view(f.residual), {}, view(rstd), 0.5f});
    EXPECT_TRUE(at::equal(rstd, f.rstd)) << "without a sum";
  }
}

TEST(Norm, EachKindIsItsFormulaBackward) {
  for (NormKind kind : kKinds) {
    SCOPED_TRACE(text_of(kind));
    const Fixture f(DType::kF32, kind);
    const c10::InferenceMode with_autograd(false);
    const auto leaf = [](const at::Tensor& t) {
      return t.defined() ? t.to(at::kDouble).requires_grad_() : t;
    };
    const at::Tensor x = leaf(f.x), weight = leaf(f.weight), bias = leaf(f.bias);
    f.formula(x, weight, bias).mul(f.dy.to(at::kDouble)).sum().backward();
    const at::Tensor out = f.empty(), dx = f.dresidual.clone();
    norm_forward(f.context, f.norm(), view(f.x), view(out), view(f.rstd));
    const auto backward = [&](const View& dresidual, bool first) {
      norm_backward(
          f.context, f.norm(),
          {.dy = view(f.dy), .x = view(f.x), .rstd = view(f.rstd), .dresidual = dresidual, .dx = view(dx)},
          first);
    };
    backward(view(dx), true);
    expect_near(dx, x.grad() + f.dresidual, "dx");
    if (weight.defined()) expect_near(f.dweight, weight.grad(), "dweight");
    if (bias.defined()) expect_near(f.dbias, bias.grad(), "dbias");
    backward({}, false);
    expect_near(dx, x.grad(), "dx without a residual");
    if (weight.defined()) expect_near(f.dweight, 2 * weight.grad(), "dweight of two micro-batches");
    if (bias.defined()) expect_near(f.dbias, 2 * bias.grad(), "dbias of two micro-batches");
  }
}

// One kernel or several: the same bits.
TEST(Norm, AddedIsRoundedAsNormScaleAndSumAre) {
  for (NormKind kind : kKinds) {
    SCOPED_TRACE(text_of(kind));
    const Fixture f(DType::kBF16, kind);
    const at::Tensor normed = f.empty(), sum = f.empty();
    norm_forward(f.context, f.norm(), view(f.x), view(normed), {});
    for (const float factor : {1.f, 0.3f}) {
      norm_forward_added(f.context, f.norm(), {view(f.x), view(f.residual), view(sum), {}, factor});
      EXPECT_TRUE(at::equal(sum, f.residual + normed * factor)) << factor;
    }
  }
}

// RMSNorm rounds before the weight multiplies, or behind: in bf16 the kinds differ where their formulas do
// not.
TEST(Norm, KindsRoundWhereTheirFilesExpect) {
  const auto out = [](NormKind kind) {
    const Fixture f(DType::kBF16, kind);
    const at::Tensor result = f.empty();
    norm_forward(f.context, f.norm(), view(f.x), view(result), {});
    return result;
  };
  const Fixture f(DType::kBF16, NormKind::kRmsLate);
  EXPECT_TRUE(at::equal(out(NormKind::kRmsPlain) * f.weight, out(NormKind::kRms)));
  EXPECT_FALSE(at::equal(out(NormKind::kRmsLate), out(NormKind::kRms)));
}

TEST(Norm, OnlyRmsNormsAreOfSeveralVectorsInARow) {
  constexpr int64_t kEach = kWidth / 3;
  for (NormKind kind : kKinds) {
    SCOPED_TRACE(text_of(kind));
    const Fixture f(DType::kF32, kind, kEach);
    const at::Tensor out = f.empty(), rstd = at::empty({kRows, 3}, at::kFloat);
    const auto forward = [&] {
      norm_forward(f.context, f.norm(), view(f.x), view(out), view(rstd), {3, kEach});
    };
    const auto backward = [&] {
      norm_backward(f.context, f.norm(),
                    {.dy = view(f.dy), .x = view(f.x), .rstd = view(rstd), .dx = view(f.dy)}, {3, kEach},
                    true);
    };
    if (f.norm_spec.centred()) {
      EXPECT_THROW(forward(), Error);
      EXPECT_THROW(backward(), Error);
      continue;
    }
    forward();
    expect_near(out, f.formula(f.x.view({-1, kEach})), "out");
    const at::Tensor dy = f.exact(f.dy).view({-1, kEach});
    backward();
    if (f.weight.defined()) {
      const at::Tensor x = f.exact(f.x).view({-1, kEach});
      const at::Tensor n = x * (x.square().mean(-1, true) + kEps).rsqrt();
      EXPECT_LE((f.dweight.to(at::kDouble) - (dy * n).sum(0)).abs().max().item<double>(), 1e-4);
    }
  }
}

TEST(Norm, SumsTakeMemoryOnlyWhereTheyAreWanted) {
  const auto memory = [](NormKind kind, bool train_weight, bool train_bias) {
    const Fixture f(DType::kF32, kind);
    const at::Tensor out = f.empty();
    norm_forward(f.context, f.norm(), view(f.x), view(out), view(f.rstd));
    Norm norm = f.norm();
    if (!train_weight) norm.weight.gradient = {};
    if (!train_bias) norm.bias.gradient = {};
    f.context.arena.restart_high_water();
    const int64_t before = f.context.arena.high_water();
    norm_backward(f.context, norm, {.dy = view(f.dy), .x = view(f.x), .rstd = view(f.rstd), .dx = view(f.dy)},
                  true);
    return f.context.arena.high_water() - before;
  };
  constexpr int64_t kSums = 256, kBlocks = 768;  // 48 floats, and 3 * 48, in steps of 256 bytes
  EXPECT_EQ(memory(NormKind::kRms, false, false), 0);
  EXPECT_EQ(memory(NormKind::kRms, true, false), kSums + kBlocks);
  EXPECT_EQ(memory(NormKind::kRmsPlain, true, true), 0);
  EXPECT_EQ(memory(NormKind::kLayer, false, false), 0);
  EXPECT_EQ(memory(NormKind::kLayer, true, false), kSums + 1280);
  EXPECT_EQ(memory(NormKind::kLayer, false, true), kSums + 1280);
  EXPECT_EQ(memory(NormKind::kLayer, true, true), 2 * kSums + 1280);
}

}  // namespace
}  // namespace lm
