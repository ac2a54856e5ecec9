// A mixture of experts where what the router says is special: experts that nobody chooses, tokens that are
// all alike, more micro-batches than one, rows behind the tokens. What it computes is in block_test.cpp.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/library.h"
#include "kernels/runtime.h"
#include "model/bind.h"
#include "model/carried.h"
#include "model/routers.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kHidden = 32, kFfn = 12, kExperts = 4, kChosen = 2;

ModelSpec experts_spec() {
  ModelSpec spec = llama_spec({.hidden = kHidden, .ffn = 24, .heads = 4, .kv_heads = 2, .head_dim = 8});
  spec.layers[0].sublayers = {
      {.norm = std::nullopt,
       .mixer = ExpertsSpec{.experts = kExperts, .chosen = kChosen, .ffn = kFfn, .renormalise = true}}};
  spec.names.modules.push_back({"mlp.gate", "experts.router"});
  for (const char* name : {"experts.gate", "experts.up", "experts.down"})
    spec.names.modules.push_back({"mlp.experts.*.one", name});
  return spec;
}

// A layer of experts alone, x + experts(x), of `tokens` tokens in `rows` rows.
struct Layer {
  explicit Layer(int64_t tokens, int64_t of_rows = 0)
      : rows(of_rows > 0 ? of_rows : tokens), stream(start_torch(DeviceType::kCpu, 1, true)) {
    at::manual_seed(5);
    weights = at::randn({layout.blocks[1].flat_elements}, at::kFloat).mul_(0.3);
    gradients = at::full({layout.blocks[1].flat_elements}, 7, at::kFloat);
    x = at::randn({rows, kHidden}, at::kFloat);
    dy = at::randn({rows, kHidden}, at::kFloat);
    batch.tokens = tokens;
    batch.rows = rows;
    batch.carried = &carried;
  }

  at::Tensor find(const at::Tensor& array, const std::string& name) const {
    const TensorPlace& place = *layout.blocks[1].find("layers.0.experts." + name);
    return array.narrow(0, place.offset, place.parameter.elements())
        .view({place.parameter.rows, place.parameter.columns});
  }

  // x + experts(x); dx and the gradients become those of sum of that times dy.
  at::Tensor run(bool first = true) {
    const auto at = [](const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); };
    const auto view = [](const at::Tensor& t) {
      return view_of(t.data_ptr(), DType::kF32, t.size(0), t.size(1));
    };
    TransformerBlock block =
        ModelBinding(spec, layout, nullptr)
            .transformer(1, {.trainable = at(weights), .frozen = nullptr, .gradients = at(gradients)},
                         {.dtype = DType::kF32, .training = true});
    if (only >= 0) freeze_others(std::get<Experts>(block.sublayers[0].mixer));
    const ArenaFrame frame(arena);
    const at::Tensor out = at::empty_like(x);
    BlockSaved saved = allocate_block_saved(context, block, rows);
    block_forward(context, block, batch, view(x), saved, view(out));
    dx = dy.clone();
    block_backward(context, block, batch, view(x), saved, {.dx = view(dx), .first = first});
    return out;
  }

  void freeze_others(Experts& mixer) const {
    mixer.router.weight.gradient = {};
    for (size_t e = 0; e < kExperts; ++e) {
      if (static_cast<int64_t>(e) == only) continue;
      mixer.experts[e].gate_up.weight.gradient = mixer.experts[e].down.weight.gradient = {};
    }
  }

  int64_t rows;
  int64_t only = -1;  // the expert that alone is trained; -1: all are
  ModelSpec spec = experts_spec();
  ModelLayout layout = make_layout(spec, nullptr, DType::kF32);
  StreamView stream;
  Arena arena{DeviceType::kCpu, int64_t{4} << 20};
  RopeTable rope;
  Uploads uploads;
  Context context{spec,  DType::kF32, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,        uploads};
  Carried carried;
  DeviceBatch batch;
  at::Tensor weights, gradients, x, dx, dy;
};

// The router looks at x[0] alone: experts 1 and 3 where it is positive, 0 and 2 where it is negative.
void split_by_sign(Layer& layer) {
  at::Tensor router = layer.find(layer.weights, "router");
  router.zero_();
  for (int64_t e = 0; e < kExperts; ++e) router[e][0] = e % 2 == 1 ? 1 + 0.1 * static_cast<double>(e) : -1.0;
}

TEST(Experts, AnExpertWithoutTokensGetsZeroGradients) {
  Layer layer(6);
  split_by_sign(layer);
  layer.x.select(1, 0).abs_().add_(0.5);
  layer.run();
  for (const char* matrix : {"gate_up", "down"}) {
    for (size_t e = 0; e < kExperts; ++e) {
      const at::Tensor gradient = layer.find(layer.gradients, std::to_string(e) + "." + matrix);
      EXPECT_EQ(gradient.ne(0).any().item<bool>(), e % 2 == 1) << e;
      EXPECT_FALSE(gradient.eq(7).any().item<bool>()) << "left as it was: " << e;
    }
  }
}

TEST(Experts, GradientsOfMicroBatchesAddUp) {
  Layer layer(6);
  split_by_sign(layer);
  layer.x.select(1, 0).abs_().add_(0.5);
  layer.run();
  const at::Tensor before = layer.gradients.clone();
  layer.x.select(1, 0).neg_();  // the others' turn
  layer.run(false);
  for (size_t e = 0; e < kExperts; ++e) {
    const std::string name = std::to_string(e) + ".down";
    const at::Tensor now = layer.find(layer.gradients, name), then = layer.find(before, name);
    EXPECT_EQ(at::equal(now, then), e % 2 == 1)
        << "a second micro-batch that does not choose it adds nothing: " << e;
    EXPECT_TRUE(now.ne(0).any().item<bool>()) << e;
  }
}

TEST(Experts, OneExpertMayBeTrainedAlone) {
  Layer all(6), one(6);
  one.only = 2;
  all.run(), one.run();
  for (const char* matrix : {"gate_up", "down"}) {
    for (size_t e = 0; e < kExperts; ++e) {
      const std::string name = std::to_string(e) + "." + matrix;
      const at::Tensor gradient = one.find(one.gradients, name);
      const at::Tensor wanted = e == 2 ? all.find(all.gradients, name) : at::full_like(gradient, 7);
      EXPECT_TRUE(at::equal(gradient, wanted)) << name;
    }
  }
  EXPECT_TRUE(at::equal(one.dx, all.dx));
}

TEST(Experts, OfEqualLogitsTheFirstAreChosen) {
  Layer layer(5);
  layer.find(layer.weights, "router").zero_();
  layer.run();
  for (size_t e = 0; e < kExperts; ++e)
    EXPECT_EQ(layer.find(layer.gradients, std::to_string(e) + ".down").ne(0).any().item<bool>(), e < kChosen)
        << e;
}

TEST(Experts, RowsBehindTheTokensAddNothing) {
  Layer exact(7), rounded(7, 32);
  rounded.x.narrow(0, 0, 7).copy_(exact.x);
  rounded.dy.narrow(0, 0, 7).copy_(exact.dy);
  rounded.dy.narrow(0, 7, 25).zero_();
  const at::Tensor want = exact.run(), got = rounded.run();
  // The router's product has other numbers of rows.
  EXPECT_LE((got.narrow(0, 0, 7) - want).abs().max().item<float>(), 1e-5F);
  EXPECT_TRUE(at::equal(got.narrow(0, 7, 25), rounded.x.narrow(0, 7, 25)))
      << "the residual stream goes through";
  EXPECT_LE((rounded.gradients - exact.gradients).norm().item<float>() / exact.gradients.norm().item<float>(),
            1e-6F);
  EXPECT_TRUE(rounded.dx.narrow(0, 7, 25).eq(0).all().item<bool>());
}

TEST(Experts, RowsOfExpertsMayBeRoundedUp) {
  Layer exact(9), rounded(9, 32);
  rounded.context.round_rows = true;
  rounded.x.narrow(0, 0, 9).copy_(exact.x);
  rounded.dy.narrow(0, 0, 9).copy_(exact.dy);
  rounded.dy.narrow(0, 9, 23).zero_();
  const at::Tensor want = exact.run(), got = rounded.run();
  EXPECT_LE((got.narrow(0, 0, 9) - want).abs().max().item<float>(), 1e-5F);
  EXPECT_LE((rounded.gradients - exact.gradients).norm().item<float>() / exact.gradients.norm().item<float>(),
            1e-6F);
  EXPECT_LE((rounded.dx.narrow(0, 0, 9) - exact.dx).abs().max().item<float>(), 1e-5F);
}

TEST(Experts, TheBalanceOfTheirLoadHasTheGradientOfTheWholeStep) {
  constexpr double kCoefficient = 0.5, kScale = 2;
  Layer layer(9);
  layer.dy.zero_();
  Routers routers(layer.spec);
  layer.batch.routers = &routers;
  // Two micro-batches alike: loads are those of one, and each has half of the gradient.
  routers.begin(0, 1);
  routers.count_forward(true);
  layer.run();
  layer.run();
  const std::vector<double> sums(routers.sums().begin(), routers.sums().end());
  routers.begin(kCoefficient, kScale);
  std::ranges::copy(sums, routers.sums().begin());
  routers.settle();
  layer.run();  // is not counted: it stands for a recomputation
  EXPECT_EQ(std::vector<double>(routers.sums().begin(), routers.sums().end()), sums);
  const c10::InferenceMode with_autograd(false);
  const at::Tensor router = layer.find(layer.weights, "router").to(at::kDouble).clone().requires_grad_();
  const at::Tensor p = layer.x.to(at::kDouble).mm(router.t()).softmax(-1);
  const at::Tensor loads = at::zeros_like(p).scatter(1, std::get<1>(p.topk(kChosen, -1)), 1).mean(0).detach();
  const at::Tensor balance = kExperts * (loads * p.mean(0)).sum();
  balance.backward();
  EXPECT_NEAR(routers.figures().balance, balance.item<double>(), 1e-6);
  const at::Tensor expected = router.grad() * (kCoefficient * kScale / 2);
  const at::Tensor got = layer.find(layer.gradients, "router").to(at::kDouble);
  EXPECT_LT((got - expected).norm().item<double>(), 1e-5 * expected.norm().item<double>());
  EXPECT_GT(layer.dx.abs().max().item<double>(), 0);  // what reaches the input through the router
}

}  // namespace
}  // namespace lm
