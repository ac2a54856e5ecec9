// A layer of gpt-oss, whose attention has sinks and whose experts have biases and a clamped GLU: forward and
// backward against LibTorch's autograd in fp64, and experts that nobody chooses.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/library.h"
#include "kernels/runtime.h"
#include "model/bind.h"
#include "model/carried.h"
#include "tests/support/llama_spec.h"

namespace lm {
namespace {

constexpr int64_t kRows = 9, kHidden = 48, kFfn = 12, kExperts = 5, kChosen = 2;

struct Shape {
  bool sinks = true, biases = true, clamped = true, beside = false;
  int64_t window = 0;
};

ModelSpec spec_of(const Shape& shape) {
  ModelSpec spec = llama_spec({.hidden = kHidden, .ffn = 40, .heads = 4, .kv_heads = 2, .head_dim = 8});
  AttentionSpec attention = spec.layers[0].attention();
  attention.sinks = shape.sinks;
  attention.window = shape.window;
  ExpertsSpec experts{.experts = kExperts,
                      .chosen = kChosen,
                      .ffn = kFfn,
                      .renormalise = true,
                      .bias = shape.biases,
                      .router_bias = shape.biases};
  if (shape.clamped) experts.clamped = ClampedGlu{.alpha = 1.702, .limit = 0.7};
  const NormSpec norm{.kind = NormKind::kRmsLate};
  spec.layers[0].sublayers = {{.norm = norm, .mixer = attention}, {.norm = norm, .mixer = experts}};
  if (shape.beside) {
    spec.layers[0].sublayers[1].norm.reset();
    spec.layers[0].sublayers[1].beside = true;
  }
  spec.names.vectors.push_back({"attn.sinks", "sinks"});
  spec.names.modules.push_back({"router", "experts.router"});
  for (const char* name : {"experts.gate", "experts.up", "experts.down", "experts.gate_up"})
    spec.names.modules.push_back({"experts.*.one", name});
  return spec;
}

struct Layer {
  explicit Layer(const Shape& shape)
      : spec(spec_of(shape)),
        layout(make_layout(spec, nullptr, DType::kF32)),
        stream(start_torch(DeviceType::kCpu, 1, true)),
        rope(spec, kRows, DType::kF32, DeviceType::kCpu, stream) {
    at::manual_seed(3);
    weights = at::randn({layout.blocks[1].flat_elements}, at::kFloat).mul_(0.3);
    gradients = at::full({layout.blocks[1].flat_elements}, 7, at::kFloat);
    x = at::randn({kRows, kHidden}, at::kFloat);
    dy = at::randn({kRows, kHidden}, at::kFloat);
    batch.tokens = batch.rows = kRows;
    batch.position = positions.data();
    batch.document_start = starts.data();
    batch.document_count = 1;
    batch.carried = &carried;
  }

  static View view(const at::Tensor& t) { return view_of(t.data_ptr(), DType::kF32, t.size(0), t.size(1)); }

  bool has(const std::string& name) const { return layout.blocks[1].find("layers.0." + name) != nullptr; }
  at::Tensor find(const at::Tensor& array, const std::string& name) const {
    const TensorPlace& place = *layout.blocks[1].find("layers.0." + name);
    return array.narrow(0, place.offset, place.parameter.elements())
        .view({place.parameter.rows, place.parameter.columns});
  }

  // The layer's output; dx and the gradients become those of sum of that times dy.
  at::Tensor run(bool first = true) {
    const auto at = [](const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); };
    const BlockMemory memory{.trainable = at(weights), .frozen = nullptr, .gradients = at(gradients)};
    const TransformerBlock block =
        ModelBinding(spec, layout, nullptr).transformer(1, memory, {.dtype = DType::kF32, .training = true});
    const ArenaFrame frame(arena);
    const at::Tensor out = at::empty_like(x);
    BlockSaved saved = allocate_block_saved(context, block, kRows);
    block_forward(context, block, batch, view(x), saved, view(out));
    dx = dy.clone();
    block_backward(context, block, batch, view(x), saved, {.dx = view(dx), .first = first});
    return out;
  }

  ModelSpec spec;
  ModelLayout layout;
  StreamView stream;
  Arena arena{DeviceType::kCpu, int64_t{4} << 20};
  RopeTable rope;
  Uploads uploads;
  Context context{spec,  DType::kF32, DeviceType::kCpu, library_kernels(DeviceType::kCpu), stream,
                  arena, rope,        uploads};
  std::vector<int32_t> positions = {0, 1, 2, 3, 4, 5, 6, 7, 8}, starts = {0, kRows};
  Carried carried;
  DeviceBatch batch;
  at::Tensor weights, gradients, x, dx, dy;
};

// The same by its formulas.
class Reference {
 public:
  explicit Reference(const Layer& layer) : layer_(layer), input(layer.x.to(at::kDouble).requires_grad_()) {}

  at::Tensor run() {
    const bool beside = layer_.spec.layers[0].sublayers[1].beside;
    const at::Tensor normed = norm(input, "attn.norm");
    const at::Tensor middle = input + attention(normed);
    return middle + experts(beside ? normed : norm(middle, "mlp.norm"));
  }

  std::vector<std::pair<std::string, at::Tensor>> leaves;

 private:
  at::Tensor leaf(const std::string& name) {
    leaves.emplace_back(name, layer_.find(layer_.weights, name).to(at::kDouble).requires_grad_());
    return leaves.back().second;
  }
  at::Tensor norm(const at::Tensor& x, const std::string& name) {
    return x * (x.square().mean(-1, true) + NormSpec().eps).rsqrt() * leaf(name).view(-1);
  }
  at::Tensor product(const at::Tensor& x, const std::string& name) {
    const at::Tensor out = x.mm(leaf(name).t());
    return layer_.has(name + "_bias") ? out + leaf(name + "_bias").view(-1) : out;
  }
  at::Tensor rotated(const at::Tensor& x) const {  // [heads, T, d]
    const at::Tensor f = at::tensor(rope_frequencies(layer_.spec.ropes.front())).to(at::kDouble);
    const at::Tensor angle = at::outer(at::arange(kRows, at::kDouble), f);
    const int64_t half = f.size(0);
    const at::Tensor a = x.narrow(2, 0, half), b = x.narrow(2, half, half);
    return at::cat({a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()}, 2);
  }
  at::Tensor attention(const at::Tensor& x) {
    const AttentionSpec& a = layer_.spec.layers[0].attention();
    const at::Tensor qkv = product(x, "attn.qkv");
    const auto heads = [&](int64_t first, int64_t count) {
      return qkv.narrow(1, first, count * a.head_dim).view({kRows, count, a.head_dim}).transpose(0, 1);
    };
    const int64_t each = a.heads / a.kv_heads;
    const at::Tensor q = rotated(heads(0, a.heads)),
                     k = rotated(heads(a.q_rows(), a.kv_heads)).repeat_interleave(each, 0),
                     v = heads(a.q_rows() + a.kv_rows(), a.kv_heads).repeat_interleave(each, 0);
    at::Tensor hidden = at::ones({kRows, kRows}, at::kBool).triu(1);
    if (a.window > 0) hidden = hidden.logical_or(at::ones({kRows, kRows}, at::kBool).tril(-a.window));
    at::Tensor scores = (q.matmul(k.transpose(1, 2)) / std::sqrt(static_cast<double>(a.head_dim)))
                            .masked_fill(hidden, -INFINITY);
    if (a.sinks)
      scores = at::cat({scores, leaf("attn.sinks").view({a.heads, 1, 1}).expand({a.heads, kRows, 1})}, 2);
    const at::Tensor p = scores.softmax(-1).narrow(2, 0, kRows);
    return product(p.matmul(v).transpose(0, 1).reshape({kRows, a.q_rows()}), "attn.out");
  }
  at::Tensor experts(const at::Tensor& x) {
    const ExpertsSpec& spec = *layer_.spec.layers[0].find<ExpertsSpec>();
    const at::Tensor logits = product(x, "experts.router");
    const auto [values, chosen] = logits.topk(kChosen, -1);
    const at::Tensor weights = values.softmax(-1);
    at::Tensor out = at::zeros_like(x);
    for (size_t e = 0; e < kExperts; ++e) {
      const at::Tensor both = product(x, expert_name(e, "gate_up"));
      const at::Tensor y = product(activated(spec, both), expert_name(e, "down"));
      out = out + (weights * chosen.eq(static_cast<int64_t>(e))).sum(-1, true) * y;
    }
    return out;
  }
  static at::Tensor activated(const ExpertsSpec& spec, const at::Tensor& both) {
    if (!spec.clamped) return at::silu(both.narrow(1, 0, kFfn)) * both.narrow(1, kFfn, kFfn);
    const double limit = spec.clamped->limit;
    const at::Tensor pairs = both.view({kRows, kFfn, 2});
    const at::Tensor gate = pairs.select(2, 0).clamp_max(limit), up = pairs.select(2, 1).clamp(-limit, limit);
    return (up + 1) * gate * (gate * spec.clamped->alpha).sigmoid();
  }

  const Layer& layer_;

 public:
  at::Tensor input;
};

void expect_near(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  const at::Tensor exact = want.detach();
  // Of an expert without rows both are zero.
  EXPECT_LE(got.to(at::kDouble).sub(exact).norm().item<double>(), 1e-5 * exact.norm().item<double>()) << what;
}

TEST(GptOssBlock, IsWhatAutogradMakesOfItsFormulas) {
  const std::vector<Shape> shapes = {{},
                                     {.window = 3},
                                     {.biases = false},
                                     {.clamped = false},
                                     {.biases = false, .clamped = false},
                                     {.sinks = false},
                                     {.beside = true}};
  for (size_t i = 0; i < shapes.size(); ++i) {
    SCOPED_TRACE("shape " + std::to_string(i));
    Layer layer(shapes[i]);
    const at::Tensor out = layer.run();
    const c10::InferenceMode with_autograd(false);
    Reference reference(layer);
    const at::Tensor want = reference.run();
    want.mul(layer.dy.to(at::kDouble)).sum().backward();
    expect_near(out, want, "output");
    expect_near(layer.dx, reference.input.grad(), "dx");
    for (const auto& [name, leaf] : reference.leaves)
      expect_near(layer.find(layer.gradients, name).view(leaf.sizes()), leaf.grad(), name);
    EXPECT_EQ(reference.leaves.size(), layer.layout.blocks[1].tensors.size()) << "a tensor is not compared";
  }
}

TEST(GptOssBlock, GradientsOfMicroBatchesAddUp) {
  Layer layer({});
  layer.run();
  const at::Tensor once = layer.gradients.clone();
  layer.run(false);
  for (const TensorPlace& place : layer.layout.blocks[1].tensors) {
    const std::string name = place.parameter.name.substr(std::string("layers.0.").size());
    expect_near(layer.find(layer.gradients, name), layer.find(once, name).to(at::kDouble).mul(2), name);
  }
}

TEST(GptOssBlock, AnExpertWithoutTokensGetsZeroGradientsOfItsBiasesToo) {
  Layer layer({});
  layer.find(layer.weights, "experts.router_bias").select(0, 2).fill_(-1e4);
  layer.run();
  for (const char* name : {"gate_up", "gate_up_bias", "down", "down_bias"}) {
    EXPECT_TRUE(layer.find(layer.gradients, std::string("experts.2.") + name).eq(0).all().item<bool>())
        << name;
    EXPECT_FALSE(layer.find(layer.gradients, std::string("experts.1.") + name).eq(7).any().item<bool>());
  }
}

}  // namespace
}  // namespace lm
