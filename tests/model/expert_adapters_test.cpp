// Pairs of low rank on a mixture's experts, against LibTorch's autograd over dense products of all tokens
// with all experts; experts that no token meets, and a second micro-batch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "kernels/library.h"
#include "kernels/runtime.h"
#include "model/bind.h"
#include "model/carried.h"
#include "model/merge.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kHidden = 32, kFfn = 12, kExperts = 4, kChosen = 2, kTokens = 7;
constexpr double kScale = 1.5;  // 6 / 4 of gate_up, and 3 / 2 of down

ModelSpec mixture() {
  ModelSpec spec = llama_spec({.hidden = kHidden, .ffn = 24, .heads = 4, .kv_heads = 2, .head_dim = 8});
  spec.layers[0].sublayers = {
      {.norm = std::nullopt,
       .mixer = ExpertsSpec{.experts = kExperts, .chosen = kChosen, .ffn = kFfn, .renormalise = true}}};
  spec.names.modules.push_back({"mlp.gate", "experts.router"});
  spec.names.modules.push_back({"mlp.experts.*.gate_proj", "experts.gate"});
  spec.names.modules.push_back({"mlp.experts.*.up_proj", "experts.up"});
  spec.names.modules.push_back({"mlp.experts.*.down_proj", "experts.down"});
  spec.names.experts = "mlp.experts";
  return spec;
}

using Named = std::map<std::string, at::Tensor>;  // by ends of names: "2.down.lora_B"

// A layer of experts alone, x + experts(x), with pairs.
struct Adapted {
  explicit Adapted(int64_t rank = 4) : r(rank), stream(start_torch(DeviceType::kCpu, 1, true)) {
    at::manual_seed(5);
    trained = at::randn({block().flat_elements}, at::kFloat).mul_(0.3);
    frozen = at::randn({block().frozen_bytes / 4}, at::kFloat).mul_(0.3);
    gradients = at::full({block().flat_elements}, 7, at::kFloat);
    x = at::randn({kTokens, kHidden}, at::kFloat);
    dy = at::randn({kTokens, kHidden}, at::kFloat);
    batch.tokens = batch.rows = kTokens;
    batch.carried = &carried;
  }

  const BlockLayout& block() const { return layout.blocks[1]; }
  static std::byte* bytes(const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); }
  at::Tensor find(const at::Tensor& array, const std::string& name) const {
    const TensorPlace& place = *block().find("layers.0.experts." + name);
    const int64_t first = place.frozen ? place.pieces.front().offset / 4 : place.offset;
    return array.narrow(0, first, place.parameter.elements())
        .view({place.parameter.rows, place.parameter.columns});
  }

  at::Tensor run(bool first = true) {
    const auto view = [](const at::Tensor& t) {
      return view_of(t.data_ptr(), DType::kF32, t.size(0), t.size(1));
    };
    const TransformerBlock bound =
        ModelBinding(spec, layout, &adapter)
            .transformer(
                1, {.trainable = bytes(trained), .frozen = bytes(frozen), .gradients = bytes(gradients)},
                {.dtype = DType::kF32, .training = true});
    const ArenaFrame frame(arena);
    const at::Tensor out = at::empty_like(x);
    BlockSaved saved = allocate_block_saved(context, bound, kTokens);
    block_forward(context, bound, batch, view(x), saved, view(out));
    dx = dy.clone();
    block_backward(context, bound, batch, view(x), saved, {.dx = view(dx), .first = first});
    return out;
  }

  // Only experts 1 and 3 are met.
  void leave_two_out() {
    at::Tensor router = find(frozen, "router");
    router.zero_();
    for (int64_t e = 0; e < kExperts; ++e)
      router[e][0] = e % 2 == 1 ? 1 + 0.1 * static_cast<double>(e) : -1.0;
    x.select(1, 0).abs_().add_(0.5);
  }

  // What run gives, and the gradients of x and of all pairs, in fp64.
  at::Tensor expected(Named& to) const {
    const at::Tensor in = x.to(at::kDouble).clone().requires_grad_();
    const auto weight = [&](const std::string& matrix) {
      Named pair;
      for (const char* half : {".lora_A", ".lora_B"})
        pair[half] = to[matrix + half] =
            find(trained, matrix + half).to(at::kDouble).clone().requires_grad_();
      return find(frozen, matrix).to(at::kDouble) + kScale * pair[".lora_B"].mm(pair[".lora_A"]);
    };
    const at::Tensor p = in.mm(find(frozen, "router").to(at::kDouble).t()).softmax(-1);
    const auto [best, index] = p.topk(kChosen, -1);
    const at::Tensor share = at::zeros_like(p).scatter(1, index, best / best.sum(-1, true));
    at::Tensor out = in;
    for (int64_t e = 0; e < kExperts; ++e) {
      const std::string expert = std::to_string(e);
      const at::Tensor both = in.mm(weight(expert + ".gate_up").t());
      const at::Tensor h = at::silu(both.narrow(1, 0, kFfn)) * both.narrow(1, kFfn, kFfn);
      out = out + share.narrow(1, e, 1) * h.mm(weight(expert + ".down").t());
    }
    (out * dy.to(at::kDouble)).sum().backward();
    to["x"] = in;
    return out.detach();
  }

  int64_t r;  // of gate_up
  ModelSpec spec = mixture();
  AdapterSpec adapter{.r = r,
                      .alpha = 6,
                      .targets = {"experts.gate_up_proj", "experts.down_proj"},
                      .ranks = {{"experts.down_proj", 2}},
                      .alphas = {{"experts.down_proj", 3}}};
  ModelLayout layout = make_layout(spec, &adapter, DType::kF32);
  StreamView stream;
  Arena arena{DeviceType::kCpu, int64_t{4} << 20};
  RopeTable rope;
  Uploads uploads;
  Context context{spec,  DType::kF32, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,        uploads};
  Carried carried;
  DeviceBatch batch;
  at::Tensor trained, frozen, gradients, x, dx, dy;
};

void expect_near(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  const double size = want.norm().item<double>();
  EXPECT_LE((got.to(at::kDouble) - want).norm().item<double>(), 1e-5 * size) << what;
}

// The gradients of x and of all pairs; those of experts without tokens are exactly 0.
void expect_gradients(const Adapted& layer, const Named& want) {
  for (const auto& [name, leaf] : want) {
    if (name == "x") continue;
    const at::Tensor got = layer.find(layer.gradients, name);
    if (leaf.grad().ne(0).any().item<bool>()) {
      expect_near(got, leaf.grad(), name);
    } else {
      EXPECT_FALSE(got.ne(0).any().item<bool>()) << name;
    }
  }
  expect_near(layer.dx, want.at("x").grad(), "x");
}

TEST(ExpertAdapters, AreAsDenseProductsOfEveryExpert) {
  Adapted layer;
  const at::Tensor got = layer.run();
  const c10::InferenceMode with_autograd(false);
  Named want;
  expect_near(got, layer.expected(want), "y");
  ASSERT_EQ(want.size(), 4 * kExperts + 1);
  expect_gradients(layer, want);
}

TEST(ExpertAdapters, OfAnExpertWithoutTokensHaveZeroGradients) {
  Adapted layer;
  layer.leave_two_out();
  layer.run();
  const c10::InferenceMode with_autograd(false);
  Named want;
  layer.expected(want);
  EXPECT_FALSE(want.at("2.down.lora_A").grad().ne(0).any().item<bool>());
  EXPECT_TRUE(want.at("3.down.lora_A").grad().ne(0).any().item<bool>());
  expect_gradients(layer, want);
}

TEST(ExpertAdapters, OfASecondMicroBatchAreAdded) {
  Adapted layer;
  layer.leave_two_out();
  layer.run();
  const at::Tensor once = layer.gradients.clone();
  layer.run(false);
  for (const char* name : {"1.gate_up.lora_A", "3.down.lora_B", "0.down.lora_A", "2.gate_up.lora_B"}) {
    const at::Tensor one = layer.find(once, name), two = layer.find(layer.gradients, name);
    EXPECT_LE((two - 2 * one).norm().item<float>(), 1e-5F * one.norm().item<float>()) << name;
  }
  const at::Tensor twice = layer.gradients.clone();
  layer.x.select(1, 0).neg_();  // the other two experts are met
  layer.run(false);
  for (const char* name : {"1.gate_up.lora_A", "3.down.lora_B"}) {
    EXPECT_TRUE(layer.find(twice, name).ne(0).any().item<bool>()) << name;
    EXPECT_TRUE(layer.find(layer.gradients, name).equal(layer.find(twice, name))) << name;
  }
  EXPECT_TRUE(layer.find(layer.gradients, "2.gate_up.lora_B").ne(0).any().item<bool>());
}

TEST(ExpertAdapters, TakeMemoryThatDoesNotDependOnTheRouter) {
  int64_t peaks[2] = {};
  for (const bool uneven : {false, true}) {
    Adapted layer(256);                 // what pairs reduce is most of it
    if (uneven) layer.leave_two_out();  // two experts have all tokens
    layer.run();
    peaks[uneven ? 1 : 0] = layer.arena.high_water();
  }
  EXPECT_EQ(peaks[0], peaks[1]);
}

TEST(ExpertAdapters, AreOfAllRowsOfAMergedMatrix) {
  Adapted layer;
  for (const char* matrix : {"3.gate_up", "1.down"}) {
    const TensorPlace& place = *layer.block().find(std::string("layers.0.experts.") + matrix);
    const at::Tensor weight = layer.find(layer.frozen, matrix).clone();
    const at::Tensor want =
        weight.to(at::kDouble) +
        kScale * layer.find(layer.trained, matrix + std::string(".lora_B"))
                     .to(at::kDouble)
                     .mm(layer.find(layer.trained, matrix + std::string(".lora_A")).to(at::kDouble));
    merge_adapters(layer.block(), place, layer.adapter,
                   {.trainable = Adapted::bytes(layer.trained),
                    .weight = Adapted::bytes(weight),
                    .threads = 1,
                    .kernels = layer.context.kernels});
    expect_near(weight, want, matrix);
  }
}

}  // namespace
}  // namespace lm
