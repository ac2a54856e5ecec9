// A mixture whose router has sigmoid scores and a correction of its choice, against LibTorch's autograd; and
// in bf16, where the correction stays fp32 and the router's logits are fp32 products.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "kernels/library.h"
#include "kernels/runtime.h"
#include "model/bind.h"
#include "model/carried.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kHidden = 32, kFfn = 12, kExperts = 8, kChosen = 3, kRows = 11;

ModelSpec spec_of(const ExpertsSpec& experts) {
  ModelSpec spec = llama_spec({.hidden = kHidden, .ffn = 24, .heads = 4, .kv_heads = 2, .head_dim = 8});
  spec.layers[0].sublayers = {{.norm = std::nullopt, .mixer = experts}};
  spec.names.modules.push_back({"mlp.gate", "experts.router"});
  for (const char* name : {"experts.gate", "experts.up", "experts.down"})
    spec.names.modules.push_back({"mlp.experts.*.one", name});
  spec.names.vectors.push_back({"experts.correction", "mlp.gate.e_score_correction_bias"});
  return spec;
}

ExpertsSpec sigmoid_experts(bool renormalise, int64_t groups, int64_t kept, double scale) {
  return {.experts = kExperts,
          .chosen = kChosen,
          .ffn = kFfn,
          .renormalise = renormalise,
          .scores = RouterScores::kSigmoid,
          .groups = groups,
          .kept_groups = kept,
          .weight_scale = scale,
          .wide_logits = true};
}

// x + experts(x) of a layer that has nothing else.
struct Layer {
  Layer(const ExpertsSpec& of, DType of_type)
      : dtype(of_type),
        type(dtype == DType::kF32 ? at::kFloat : at::kBFloat16),
        spec(spec_of(of)),
        stream(start_torch(DeviceType::kCpu, 1, true)) {
    at::manual_seed(5);
    weights = at::randn({layout.blocks[1].flat_elements}, at::kFloat).mul_(0.3).to(type);
    gradients = at::full({layout.blocks[1].flat_elements}, 7, at::kFloat);
    correction = at::randn({kExperts}, at::kFloat).mul_(0.3);
    frozen.resize(static_cast<size_t>(layout.blocks[1].frozen_bytes));
    const TensorPlace& place = *layout.blocks[1].find("layers.0.experts.correction");
    std::memcpy(frozen.data() + place.offset, correction.data_ptr(), kExperts * sizeof(float));
    x = at::randn({kRows, kHidden}, at::kFloat).to(type);
    dy = at::randn({kRows, kHidden}, at::kFloat).to(type);
  }

  View view(const at::Tensor& t) const { return view_of(t.data_ptr(), dtype, t.size(0), t.size(1)); }
  at::Tensor find(const at::Tensor& array, const std::string& name) const {
    const TensorPlace& place = *layout.blocks[1].find("layers.0.experts." + name);
    return array.narrow(0, place.offset, place.parameter.elements())
        .view({place.parameter.rows, place.parameter.columns});
  }

  // dx and the gradients become those of sum of the output times dy.
  at::Tensor run() {
    const auto at = [](const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); };
    DeviceBatch batch;
    batch.tokens = batch.rows = kRows;
    const Carried carried;
    batch.carried = &carried;
    const TransformerBlock block =
        ModelBinding(spec, layout, nullptr)
            .transformer(1, {.trainable = at(weights), .frozen = frozen.data(), .gradients = at(gradients)},
                         {.dtype = dtype, .training = true});
    const ArenaFrame frame(arena);
    const at::Tensor out = at::empty_like(x);
    BlockSaved saved = allocate_block_saved(context, block, kRows);
    block_forward(context, block, batch, view(x), saved, view(out));
    dx = dy.clone();
    block_backward(context, block, batch, view(x), saved, {.dx = view(dx), .first = true});
    return out;
  }

  DType dtype;
  at::ScalarType type;
  ModelSpec spec;
  ModelLayout layout = make_layout(spec, nullptr, dtype);
  StreamView stream;
  Arena arena{DeviceType::kCpu, int64_t{4} << 20};
  RopeTable rope;
  Uploads uploads;
  Context context{spec,  dtype, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,  uploads};
  at::Tensor weights, gradients, correction, x, dy, dx;
  std::vector<std::byte> frozen;
};

// The same in fp64, as DeepSeek-V3's paper has it.
struct Expected {
  explicit Expected(const Layer& layer) {
    const ExpertsSpec& spec = *layer.spec.layers[0].find<ExpertsSpec>();
    const auto leaf = [&](const std::string& name) {
      return layer.find(layer.weights, name).to(at::kDouble).detach().requires_grad_();
    };
    x = layer.x.to(at::kDouble).requires_grad_();
    router = leaf("router");
    const at::Tensor scores = x.mm(router.t()).sigmoid();
    at::Tensor choice = scores + layer.correction.to(at::kDouble);
    const int64_t each = kExperts / spec.groups;
    const at::Tensor of_group =
        std::get<0>(choice.view({kRows, spec.groups, each}).topk(std::min<int64_t>(2, each), -1)).sum(-1);
    const at::Tensor kept = std::get<1>(of_group.topk(spec.kept_groups, -1));
    const at::Tensor mask = at::zeros_like(of_group).scatter(1, kept, 1).repeat_interleave(each, 1);
    choice = choice.masked_fill(mask.eq(0), -INFINITY);
    chosen = std::get<1>(choice.topk(kChosen, -1));
    at::Tensor weight = scores.gather(1, chosen);
    if (spec.renormalise) weight = weight / weight.sum(-1, true);
    weight = weight * spec.weight_scale;
    out = x;
    for (int64_t e = 0; e < kExperts; ++e) {
      const auto number = static_cast<size_t>(e);
      gate_up.push_back(leaf(std::to_string(number) + ".gate_up"));
      down.push_back(leaf(std::to_string(number) + ".down"));
      const at::Tensor both = x.mm(gate_up.back().t()),
                       h = at::silu(both.narrow(1, 0, kFfn)) * both.narrow(1, kFfn, kFfn);
      out = out + (weight * chosen.eq(e)).sum(-1, true) * h.mm(down.back().t());
    }
    (out * layer.dy.to(at::kDouble)).sum().backward();
  }
  at::Tensor x, router, chosen, out;
  std::vector<at::Tensor> gate_up, down;
};

void expect_close(const at::Tensor& got, const at::Tensor& want, double bound, const std::string& what) {
  const double error = (got.to(at::kDouble) - want).norm().item<double>() / want.norm().item<double>();
  EXPECT_LT(error, bound) << what;
}

TEST(SigmoidExperts, ComputeWhatAutogradDoes) {
  for (const ExpertsSpec& spec : {sigmoid_experts(true, 1, 1, 1), sigmoid_experts(false, 1, 1, 2.5),
                                  sigmoid_experts(true, 4, 2, 1.5)}) {
    SCOPED_TRACE("groups " + std::to_string(spec.groups));
    Layer layer(spec, DType::kF32);
    const at::Tensor out = layer.run();
    const c10::InferenceMode with_autograd(false);
    const Expected expected(layer);
    expect_close(out, expected.out, 1e-5, "output");
    expect_close(layer.dx, expected.x.grad(), 1e-5, "dx");
    expect_close(layer.find(layer.gradients, "router"), expected.router.grad(), 1e-5, "router");
    for (size_t e = 0; e < kExperts; ++e) {
      if (expected.gate_up[e].grad().norm().item<double>() == 0) continue;  // nobody has chosen it
      expect_close(layer.find(layer.gradients, expert_name(e, "gate_up").substr(8)),
                   expected.gate_up[e].grad(), 1e-5, expert_name(e, "gate_up"));
      expect_close(layer.find(layer.gradients, expert_name(e, "down").substr(8)), expected.down[e].grad(),
                   1e-5, expert_name(e, "down"));
    }
  }
}

TEST(SigmoidExperts, ACorrectionIsFrozenFp32InABf16ModelAndSmallOnesDecide) {
  // All logits are 0: the corrections alone choose, and differ by less than bf16 tells apart.
  Layer layer(sigmoid_experts(true, 1, 1, 1), DType::kBF16);
  const TensorPlace& place = *layer.layout.blocks[1].find("layers.0.experts.correction");
  EXPECT_TRUE(place.frozen && place.parameter.fp32);
  EXPECT_EQ(place.pieces.front().bytes, kExperts * 4);
  layer.find(layer.weights, "router").zero_();
  std::vector<float> corrections(kExperts, 1.0F);
  for (const size_t e : {2, 5, 7}) corrections[e] += 1e-4F;
  std::memcpy(layer.frozen.data() + place.offset, corrections.data(), kExperts * sizeof(float));
  layer.correction = at::tensor(corrections);
  const at::Tensor out = layer.run();
  const c10::InferenceMode with_autograd(false);
  const Expected expected(layer);
  EXPECT_EQ(std::get<0>(expected.chosen[0].sort()).sum().item<int64_t>(), 2 + 5 + 7);
  expect_close(out, expected.out, 2e-2, "output");
  for (size_t e = 0; e < kExperts; ++e) {
    const bool chosen = e == 2 || e == 5 || e == 7;
    const double norm = layer.find(layer.gradients, expert_name(e, "down").substr(8)).norm().item<double>();
    EXPECT_EQ(norm > 0, chosen) << e;
  }
}

TEST(SigmoidExperts, LogitsOfABf16ModelAreFp32Products) {
  // Two experts whose logits differ by less than bf16 tells apart: the larger one comes second.
  Layer layer(sigmoid_experts(true, 1, 1, 1), DType::kBF16);
  const TensorPlace& place = *layer.layout.blocks[1].find("layers.0.experts.correction");
  std::memset(layer.frozen.data() + place.offset, 0, kExperts * sizeof(float));
  layer.correction.zero_();
  layer.x.fill_(0.5);
  at::Tensor router = layer.find(layer.weights, "router");
  router.zero_();
  // 1 + 2^-10 for experts 4 to 6, and 1 for 0 to 2.
  for (int64_t e = 0; e < 7; ++e) router[e][0] = 2.0;
  for (int64_t e = 4; e < 7; ++e) router[e][1] = 1.0 / 512;
  router[3][0] = 0;
  layer.run();
  for (size_t e = 0; e < kExperts; ++e) {
    const double norm = layer.find(layer.gradients, expert_name(e, "down").substr(8)).norm().item<double>();
    EXPECT_EQ(norm > 0, e >= 4 && e < 7) << e;
  }
}

}  // namespace
}  // namespace lm
